"""Sharded weights on one axis of a mesh, and something else on the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from twins import SGD, Stack, stack_step

from backstash.nn import GroupedMLP, Linear
from backstash.weights import (
    ShardedWeight,
    ShardOptions,
    clip_gradients_,
    gradient_norm,
    shard_weights,
    sharded_weights,
)

pytestmark = pytest.mark.distributed


def mesh_of(*names: str) -> Any:
    """Four ranks as two by two."""
    return DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=names)


def whole(parameter: Tensor, rank: int, reference: Tensor) -> Tensor:
    """What a rank of the sharding group must have of a whole parameter."""
    if isinstance(parameter, ShardedWeight):
        return parameter.cut.shard(reference, rank)
    return reference


def trained_twin(twin: nn.Module, steps: int, step: Any) -> nn.Module:
    """The whole model on the batches of all four ranks."""
    optimizer = SGD(twin.parameters())
    for number in range(steps):
        twin.zero_grad()
        for rank in range(4):
            step(twin, number * 4 + rank)
        for p in twin.parameters():
            if p.grad is not None:
                p.grad /= 4
        optimizer.step()
    return twin


def beside_ddp(group: Any) -> None:
    mesh = mesh_of("replicate", "shard")
    twin = trained_twin(Stack(2), 3, stack_step)
    model = Stack(2)
    options = ShardOptions(delivery="at_once")
    sharding = shard_weights(model, mesh["shard"], options=options)
    ddp = DistributedDataParallel(model, process_group=mesh["replicate"].get_group())
    optimizer = SGD(model.parameters())
    for number in range(3):
        optimizer.zero_grad()
        torch.manual_seed(1000 + number * 4 + dist.get_rank())
        ddp(torch.randn(5, 12)).square().sum().backward()
        optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.data, whole(p, sharding.channel.rank, q).data)


def test_ddp_averages_shards_over_the_other_axis(ranks: Ranks) -> None:
    ranks.run(beside_ddp, size=4)


class Mixed(nn.Module):
    """A layer of this library and one of torch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.ours = Linear(12, 12, bias=False)
        self.theirs = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.theirs(self.ours(x).tanh())


def mixed_step(model: nn.Module, batch: int) -> None:
    torch.manual_seed(1000 + batch)
    model(torch.randn(5, 12)).square().sum().backward()


def beside_fully_shard(group: Any) -> None:
    """``fully_shard`` has torch's layer on all ranks; ours is sharded on two, twice over."""
    twin = trained_twin(Mixed(), 3, mixed_step)
    model = Mixed()
    mesh = mesh_of("replicate", "shard")
    everybody = DeviceMesh("cpu", torch.arange(4))
    fully_shard(model, mesh=everybody, ignored_params={model.ours.weight})
    options = ShardOptions(others="leave")
    sharding = shard_weights(model, mesh["shard"], options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=False)
    for number in range(3):
        optimizer.zero_grad()
        mixed_step(model, number * 4 + dist.get_rank())
        weight: Any = model.ours.weight
        dist.all_reduce(weight.grad, group=mesh["replicate"].get_group())
        weight.grad /= 2
        optimizer.step()
    weight = model.ours.weight
    wanted = whole(weight, sharding.channel.rank, twin.ours.weight.data)  # pyright: ignore
    torch.testing.assert_close(weight.data, wanted)
    theirs: Any = model.theirs.weight
    torch.testing.assert_close(theirs.full_tensor().data, twin.theirs.weight.data)  # pyright: ignore


def test_fully_shard_has_the_other_parameters(ranks: Ranks) -> None:
    ranks.run(beside_fully_shard, size=4)


def experts(first: int) -> GroupedMLP:
    """Two of four experts: each rank of the expert axis makes its own."""
    torch.manual_seed(10 + first)
    return GroupedMLP(2, 12, 6)


def with_expert_parallelism(group: Any) -> None:
    """Experts two by two on one axis, each pair sharded on the other: sharded once, not twice."""
    mesh = mesh_of("expert", "shard")
    first = 2 * mesh["expert"].get_local_rank()
    model, twin = experts(first), experts(first)
    full_bytes = sum(p.nbytes for p in model.parameters())
    sharding = shard_weights(model, mesh["shard"])
    assert sum(p.nbytes for p in model.parameters()) == full_bytes // 2
    rank = sharding.channel.rank

    def step(m: nn.Module, batch: int) -> None:
        torch.manual_seed(100 * first + batch)
        m(torch.randn(5, 12), [2, 3]).square().sum().backward()

    for batch in (0, 1):
        step(twin, batch)
    for p in twin.parameters():
        assert p.grad is not None
        p.grad /= 2
    step(model, rank)
    for name, weight in sharded_weights(model).items():
        grad = twin.get_parameter(name).grad
        assert grad is not None
        torch.testing.assert_close(weight.grad, weight.cut.shard(grad, rank))
    across = mesh["expert"].get_group()
    own = gradient_norm(twin.parameters())
    total = own.square()
    dist.all_reduce(total, group=across)
    norm = gradient_norm(model.parameters(), across=across)
    torch.testing.assert_close(norm, total.sqrt())
    torch.testing.assert_close(clip_gradients_(model.parameters(), 1.0, across=across), norm)
    torch.testing.assert_close(gradient_norm(model.parameters(), across=across), torch.tensor(1.0))


def test_experts_of_one_axis_are_sharded_over_the_other(ranks: Ranks) -> None:
    ranks.run(with_expert_parallelism, size=4)


def two_shardings(group: Any) -> None:
    """Dense weights over all ranks and experts over two of them, in one model."""

    class Both(nn.Module):
        def __init__(self, first: int) -> None:
            super().__init__()
            self.experts = experts(first)
            self.dense = Stack(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.experts(self.dense(x), [2, 3])

    mesh = mesh_of("expert", "shard")
    first = 2 * mesh["expert"].get_local_rank()
    model = Both(first)
    leave = ShardOptions(others="leave")
    shard_weights(model, mesh["shard"], filter=lambda n, p: "experts" in n, options=leave)
    shard_weights(model, filter=lambda n, p: "dense" in n)
    assert list(sharded_weights(model)) == [
        "experts.fc1_weight",
        "experts.fc2_weight",
        "dense.layers.0.weight",
    ]
    for number in range(2):
        torch.manual_seed(number)
        model(torch.randn(5, 12)).square().sum().backward()
    twin = Both(first)
    for number in range(2):
        torch.manual_seed(number)
        twin(torch.randn(5, 12)).square().sum().backward()
    for name, weight in sharded_weights(model).items():
        grad = twin.get_parameter(name).grad
        assert grad is not None
        if "experts" in name:
            wanted = weight.cut.shard(grad, weight.sharding.channel.rank)
            torch.testing.assert_close(weight.grad, wanted)


def test_one_model_may_be_sharded_over_two_groups(ranks: Ranks) -> None:
    ranks.run(two_shardings, size=4)
