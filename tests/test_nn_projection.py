"""A weight that is only a shard is asked for its full self, under any hook the same object."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from backstash.errors import ModifiedError, ShapeError
from backstash.nn import GroupedLinear, Linear
from backstash.nn.projection import Needs
from nn_cases import (
    BACKWARD_SCALE,
    CASE_NAMES,
    CASES,
    COUNTS,
    FORWARD_SCALE,
    WAYS,
    Case,
    G,
    H,
    N,
    Shard,
    run,
    shard,
    weights_of,
)

LAYERS = pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)


@LAYERS
@pytest.mark.parametrize("recipe", ["high_precision", "mxfp8"])
@pytest.mark.parametrize("way", WAYS)
def test_a_shard_gives_the_same_bits_under_every_hook(case: Case, recipe: str, way: str) -> None:
    module = case.make()
    shards = shard(module)
    expected = run(case, module, recipe)
    for one in shards:
        one.asked.clear()
    found = run(case, module, recipe, way)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    forwards = 2 if "checkpoint" in way else 1
    for one in shards:
        assert one.asked.count("forward") == forwards
        # Only the very object in the module has this list, so only it can have been asked.
        assert one.asked[-2:] == ["backward", "finalize"]


@pytest.mark.parametrize("build", [lambda: Linear(H, N), lambda: GroupedLinear(G, H, N)])
def test_forward_and_backward_multiply_with_what_the_shard_gives(build: Any) -> None:
    module = build()
    x = torch.randn(sum(COUNTS), H, requires_grad=True)
    arguments = (COUNTS,) if isinstance(module, GroupedLinear) else ()
    dy = torch.randn(sum(COUNTS), N)
    module.bias = None
    y = module(x, *arguments)
    y.backward(dy)
    plain_dx, plain_dw = x.grad, module.weight.grad
    (one,) = shard(module)
    x.grad = None
    sharded_y = module(x, *arguments)
    sharded_y.backward(dy)
    assert torch.equal(sharded_y, y * FORWARD_SCALE)
    assert plain_dx is not None
    assert torch.equal(x.grad, plain_dx * BACKWARD_SCALE)  # pyright: ignore
    assert torch.equal(one.grad, plain_dw)  # pyright: ignore


@LAYERS
def test_frozen_inputs_ask_no_shard_for_backward(case: Case) -> None:
    module = case.make()
    shards = shard(module)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in ("weight", "fc1_weight"))
    inputs = [x.detach() for x in case.inputs()]
    case.call(module, *inputs).sum().backward()
    assert shards[0].asked == ["forward", "finalize"]


@LAYERS
def test_a_frozen_shard_has_no_gradient_to_hand_over(case: Case) -> None:
    module = case.make()
    shards = shard(module)
    for one in shards:
        one.requires_grad_(False)
    run(case, module)
    assert all(one.asked == ["forward", "backward"] for one in shards)


@LAYERS
def test_a_provider_that_keeps_the_gradient_leaves_autograd_none(case: Case) -> None:
    class Keeper(Shard):
        def finalize_group_grads(self, wgrads: Tensor) -> None:
            self.main_grad.add_(wgrads)

    module = case.make()
    for name, weight in weights_of(module).items():
        setattr(module, name, Keeper(weight.detach()).listen())
    run(case, module)
    for keeper in weights_of(module).values():
        assert keeper.grad is None
        assert keeper.main_grad.any()


@LAYERS
@pytest.mark.parametrize("delay", [False, True])
def test_a_fused_shard_gets_its_gradient_in_the_buffer_it_names(case: Case, delay: bool) -> None:
    plain = case.make()
    shard(plain)
    run(case, plain)
    module = case.make(fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    shards = shard(module)
    run(case, module)
    if delay:
        assert not any("finalize" in one.asked for one in shards)
        module.backward_dw()
    for one, other in zip(shards, weights_of(plain).values(), strict=True):
        assert one.asked[-2:] == ["grad_buffer", "finalize"]
        assert torch.equal(one.main_grad, other.main_grad)


def test_a_full_weight_of_the_wrong_size_is_refused() -> None:
    class Wrong(Shard):
        def materialize_group_for_forward(self) -> Tensor:
            return torch.ones(N, H + 1)

    module = Linear(H, N)
    module.weight = Wrong(module.weight.detach()).listen()
    with pytest.raises(ShapeError, match=f"must have {H} input features.*from Wrong"):
        module(torch.ones(2, H))


def test_a_shard_may_have_any_shape_of_its_own() -> None:
    class Flat(Shard):
        def materialize_group_for_forward(self) -> Tensor:
            return self.detach().view(N, H)

        materialize_group_for_backward = materialize_group_for_forward  # pyright: ignore

        def finalize_group_grads(self, wgrads: Tensor) -> Tensor:
            return wgrads.flatten()

    plain, module = Linear(H, N), Linear(H, N)
    module.load_state_dict(plain.state_dict())
    module.weight = Flat(module.weight.detach().flatten()).listen()
    x = torch.randn(3, H)
    for one in (plain, module):
        one(x).square().sum().backward()
    assert torch.equal(module.weight.grad.view(N, H), plain.weight.grad)  # pyright: ignore


def test_a_buffer_of_the_wrong_shape_is_refused() -> None:
    class Wrong(Shard):
        def grad_buffer(self) -> Tensor:
            return torch.zeros(1)

    module = Linear(H, N, fuse_wgrad_accumulation=True)
    module.weight = Wrong(module.weight.detach()).listen()
    with pytest.raises(ShapeError, match=r"grad_buffer\(\) of Wrong must have the shape"):
        module(torch.ones(2, H)).sum().backward()


@LAYERS
@pytest.mark.parametrize("way", ["no hook", "identity"])
def test_a_weight_changed_before_backward_is_an_error(case: Case, way: str) -> None:
    module = case.make()
    with WAYS[way][0]():
        y = case.call(module, *case.inputs())
    with torch.no_grad():
        for weight in weights_of(module).values():
            weight.add_(1)
    with pytest.raises(ModifiedError, match="modified in place"):
        y.sum().backward()


def test_only_a_bias_can_be_trained_without_a_matmul_in_backward() -> None:
    assert not Needs(False, False, True).matmul
    assert Needs(True, False, False).matmul
    assert Needs(False, True, False).matmul
