"""The norm over shards is the norm of the whole, and clipping is by the same number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from twins import Stack, gradients_of, stack_step

from backstash.errors import ConfigError
from backstash.nn import Linear
from backstash.weights import (
    ShardOptions,
    clip_gradients_,
    gradient_norm,
    shard_weights,
    sharded_weights,
)
from saving_cases import grad_of

pytestmark = pytest.mark.distributed


def norms(group: Any, norm_type: float) -> None:
    twin, model = Stack(2, 5), Stack(2, 5)
    sharding = shard_weights(model, group)
    for m in (twin, model):
        stack_step(m, 3)
    wanted = torch.nn.utils.get_total_norm(
        [p.grad for p in twin.parameters() if p.grad is not None], norm_type
    )
    norm = gradient_norm(model.parameters(), norm_type)
    torch.testing.assert_close(norm, wanted)
    assert torch.equal(sharding.channel.largest(norm), norm)
    clipped = clip_gradients_(model.parameters(), 0.5, norm_type)
    assert torch.equal(clipped, norm)
    torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5, norm_type)
    for name, weight in sharded_weights(model).items():
        grad = twin.get_parameter(name).grad
        assert grad is not None
        torch.testing.assert_close(weight.grad, weight.cut.shard(grad, sharding.channel.rank))
    bias = gradients_of(twin)["layers.0.bias"]
    torch.testing.assert_close(gradients_of(model)["layers.0.bias"], bias)
    before = {name: g.clone() for name, g in gradients_of(model).items() if g is not None}
    clip_gradients_(model.parameters(), 1e6, norm_type)
    assert all(torch.equal(g, before[n]) for n, g in gradients_of(model).items() if g is not None)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_five_rows_on_four_ranks_have_the_norm_of_the_whole(ranks: Ranks, norm_type: float) -> None:
    ranks.run(norms, norm_type, size=4)


def across_experts(group: Any, norm_type: float) -> float:
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.full((2,), 3.0 + torch.distributed.get_rank())
    return gradient_norm([p], norm_type, across=group).item()


def test_ranks_with_other_parameters_are_taken_together_where_that_is_said(ranks: Ranks) -> None:
    assert ranks.run(across_experts, 2.0) == [pytest.approx((2 * 9 + 2 * 16) ** 0.5)] * 2
    assert ranks.run(across_experts, float("inf")) == [4.0, 4.0]


class Mixed(nn.Module):
    """A layer of this library and one of torch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.ours = Linear(6, 6, bias=False)
        self.theirs = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.theirs(self.ours(x).tanh())


def beside_fully_shard(group: Any) -> None:
    twin, model = Mixed(), Mixed()
    mesh: Any = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("whole", "cut"))
    fully_shard(model, mesh=mesh["whole"], ignored_params={model.ours.weight})
    shard_weights(model, mesh["cut"], options=ShardOptions(others="leave"))
    for m in (twin, model):
        m(torch.arange(18.0).view(3, 6) / 18).square().sum().backward()
    wanted = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    norm = clip_gradients_(model.parameters(), 0.1)
    assert type(norm) is Tensor
    torch.testing.assert_close(norm, wanted)
    theirs: Any = model.theirs.weight.grad
    torch.testing.assert_close(theirs.full_tensor(), grad_of(twin.theirs.weight))
    weight = sharded_weights(model)["ours.weight"]
    mine = weight.cut.shard(grad_of(twin.ours.weight), weight.sharding.channel.rank)
    torch.testing.assert_close(weight.grad, mine)


def test_gradients_that_fully_shard_cuts_on_another_axis_are_clipped_too(ranks: Ranks) -> None:
    ranks.run(beside_fully_shard, size=4)


def test_without_a_gradient_the_norm_is_zero() -> None:
    assert gradient_norm([nn.Parameter(torch.zeros(2))]).item() == 0


def eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def with_gradient(values: list[float], dtype: torch.dtype) -> nn.Parameter:
    p = nn.Parameter(torch.zeros(len(values), dtype=dtype))
    p.grad = torch.tensor(values, dtype=dtype)
    return p


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_gradients_of_any_floating_dtype_have_a_norm(dtype: torch.dtype) -> None:
    mixed = [with_gradient([3.0, 0.0], dtype), with_gradient([0.0, 4.0], torch.float32)]
    assert gradient_norm(mixed).dtype is torch.float32
    assert gradient_norm(mixed).item() == 5.0
    assert clip_gradients_(mixed, 2.5).item() == 5.0
    # Torch divides by a little more than the norm; the quotient is in float32.
    clipped = pytest.approx(3.0 * 2.5 / (5.0 + 1e-6), rel=max(eps(dtype), eps(torch.float32)))
    assert grad_of(mixed[0]).tolist() == [clipped, 0.0]


@pytest.mark.parametrize("size", [1e-20, 1e19])
def test_the_norm_of_very_large_and_very_small_gradients_is_right(size: float) -> None:
    several = [with_gradient([part * size], torch.float32) for part in (3.0, 4.0)]
    assert gradient_norm(several).item() == pytest.approx(
        5 * size, rel=torch.finfo(torch.float32).eps, abs=0
    )


@pytest.mark.parametrize(("count", "norm_type"), [(0, 2.0), (1, 0.0), (1, float("nan"))])
def test_no_parameters_or_no_norm_is_refused(count: int, norm_type: float) -> None:
    with pytest.raises(ConfigError, match="needs parameters and a norm above zero"):
        gradient_norm([nn.Parameter(torch.zeros(2))] * count, norm_type)


@pytest.mark.parametrize("max_norm", [-1.0, float("nan"), None, "1"], ids=repr)
def test_a_norm_that_gradients_cannot_have_is_refused_before_anything_is_clipped(
    max_norm: Any,
) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    with pytest.raises(ConfigError, match="max_norm must be a number of at least 0, got"):
        clip_gradients_([weight], max_norm)
    assert torch.equal(weight.grad, torch.ones(3))
