"""A weight gradient arrives once, where it was asked for and when."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from backstash.errors import ConfigError, DeviceError, DtypeError, ShapeError
from backstash.nn import Linear
from backstash.nn.weight_grad import Delivery, GradientQueue, WeightGradient
from backstash.recipes import autocast
from nn_cases import (
    CASE_NAMES,
    CASES,
    RECIPES,
    ROWS,
    WAYS,
    Case,
    H,
    N,
    Shard,
    run,
    shard,
    weights_of,
)

LAYERS = pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)


def with_main_grad(module: Any, dtype: torch.dtype = torch.float32) -> Any:
    for weight in weights_of(module).values():
        weight.main_grad = torch.zeros(weight.shape, dtype=dtype)
    return module


def gradients(module: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def backward(case: Case, module: Any, seed: int = 5, recipe: str = "mxfp8") -> None:
    inputs = case.inputs()
    with autocast(recipe=recipe):
        y = case.call(module, *inputs)
    torch.manual_seed(seed)
    y.backward(torch.randn_like(y))


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.equal(found[name], grad), name


@LAYERS
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", ["no hook", "detached copies", "checkpoint"])
def test_a_delayed_gradient_is_the_same_to_the_bit(case: Case, recipe: str, way: str) -> None:
    plain, delayed = case.make(), case.make(delay_wgrad_compute=True)
    run(case, plain, recipe, way)
    run(case, delayed, recipe, way)
    assert not set(gradients(delayed)) & set(weights_of(delayed))
    delayed.backward_dw()
    assert_same(gradients(delayed), gradients(plain))
    assert len(delayed.weight_gradient.queue) == 0


@LAYERS
@pytest.mark.parametrize("fused", [False, True], ids=["autograd", "main_grad"])
def test_delayed_gradients_of_microbatches_add_up_in_their_order(case: Case, fused: bool) -> None:
    options = {"fuse_wgrad_accumulation": fused}
    plain = with_main_grad(case.make(**options))
    delayed = with_main_grad(case.make(delay_wgrad_compute=True, **options))
    for seed in range(3):
        backward(case, plain, seed)
        backward(case, delayed, seed)
    delayed.backward_dw()
    delayed.backward_dw()
    assert_same(gradients(delayed), gradients(plain))
    for one, other in zip(weights_of(delayed).values(), weights_of(plain).values(), strict=True):
        assert torch.equal(one.main_grad, other.main_grad)


def test_a_late_gradient_adds_to_one_that_is_there() -> None:
    module = Linear(H, N, delay_wgrad_compute=True)
    x = torch.randn(ROWS, H)
    module.weight.grad = torch.ones(N, H)
    module(x).sum().backward()
    module.backward_dw()
    expected = 1 + x.sum(0).expand(N, H)
    torch.testing.assert_close(module.weight.grad, expected)


def test_a_late_gradient_is_computed_as_if_outside_of_torchs_autocast() -> None:
    plain, module = Linear(H, N), Linear(H, N, delay_wgrad_compute=True)
    module.load_state_dict(plain.state_dict())
    x = torch.randn(ROWS, H)
    for one in (plain, module):
        one(x).sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module.backward_dw()
    assert_same(gradients(module), gradients(plain))


def test_asking_a_layer_that_delays_nothing_for_late_gradients_is_an_error() -> None:
    with pytest.raises(ConfigError, match="delay_wgrad_compute=True"):
        Linear(H, N).backward_dw()


@LAYERS
def test_frozen_weights_leave_nothing_for_later(case: Case) -> None:
    module = case.make(delay_wgrad_compute=True).requires_grad_(False)
    backward(case, module)
    module.backward_dw()
    assert gradients(module) == {}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_layer_does_not_owe_the_gradients_of_the_original(copied: Any) -> None:
    module = Linear(H, N, delay_wgrad_compute=True)
    module(torch.randn(ROWS, H)).sum().backward()
    other = copied(module)
    other.backward_dw()
    assert other.weight.grad is None
    assert module.weight.grad is None
    module.backward_dw()
    assert module.weight.grad is not None


@LAYERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_fused_gradient_is_added_to_main_grad_and_autograd_gets_none(
    case: Case, dtype: torch.dtype
) -> None:
    plain = case.make()
    backward(case, plain)
    fused = with_main_grad(case.make(fuse_wgrad_accumulation=True), dtype)
    backward(case, fused)
    backward(case, fused)
    for name, weight in weights_of(fused).items():
        assert weight.grad is None
        assert torch.equal(weight.main_grad, 2 * gradients(plain)[name].to(dtype))


@LAYERS
@pytest.mark.parametrize("delay", [False, True])
def test_a_framework_that_waits_for_autograds_hooks_gets_zeros(case: Case, delay: bool) -> None:
    module = with_main_grad(case.make(fuse_wgrad_accumulation=True, delay_wgrad_compute=delay))
    for weight in weights_of(module).values():
        weight.grad_added_to_main_grad = False
    backward(case, module)
    if delay:
        module.backward_dw()
    for weight in weights_of(module).values():
        assert weight.grad_added_to_main_grad
        assert torch.equal(weight.grad, torch.zeros(weight.shape))
        assert weight.main_grad.any()


@LAYERS
def test_a_missing_main_grad_is_refused_before_anything_is_computed(case: Case) -> None:
    module = case.make(fuse_wgrad_accumulation=True)
    with pytest.raises(ConfigError, match=r"weight\.main_grad.*has none; set"):
        backward(case, module)
    module.requires_grad_(False)
    backward(case, module)


@pytest.mark.parametrize(
    ("main_grad", "error"),
    [
        (3, DtypeError),
        (torch.zeros(N, H, dtype=torch.int32), DtypeError),
        (torch.zeros(N, H, device="meta"), DeviceError),
    ],
    ids=["number", "integers", "meta"],
)
def test_a_main_grad_that_holds_no_gradient_is_refused_before_anything_is_computed(
    main_grad: Any, error: type[Exception]
) -> None:
    module: Any = Linear(H, N, fuse_wgrad_accumulation=True)
    module.weight.main_grad = main_grad
    with pytest.raises(error, match=r"weight\.main_grad must be"):
        module(torch.ones(1, H))


def test_a_main_grad_of_another_shape_is_refused() -> None:
    module = Linear(H, N, fuse_wgrad_accumulation=True)
    weight: Any = module.weight
    weight.main_grad = torch.zeros(1)
    with pytest.raises(ShapeError, match=r"the weight's shape \(14, 20\), got \(1,\)"):
        module(torch.randn(1, H))


@LAYERS
@pytest.mark.parametrize("recipe", ["high_precision", "mxfp8"])
@pytest.mark.parametrize("options", [{}, {"delay_wgrad_compute": True}], ids=["now", "later"])
def test_a_layer_used_twice_in_a_step_gets_both_gradients(
    case: Case, recipe: str, options: dict[str, bool]
) -> None:
    module, once = case.make(**options), case.make()
    losses = []
    with autocast(recipe=recipe):
        for scale in (1.0, 0.5):
            losses += [scale * case.call(m, *case.inputs()).square().sum() for m in (module, once)]
    torch.stack(losses[0::2]).sum().backward()
    if options:
        module.backward_dw()
    for loss in losses[1::2]:
        loss.backward()
    for name, grad in gradients(once).items():
        torch.testing.assert_close(gradients(module)[name], grad)


@LAYERS
@pytest.mark.parametrize("fused", [False, True], ids=["autograd", "main_grad"])
def test_tied_weights_collect_the_gradients_of_both_layers(case: Case, fused: bool) -> None:
    first = with_main_grad(case.make(fuse_wgrad_accumulation=fused))
    second = case.make(fuse_wgrad_accumulation=fused)
    for name, weight in weights_of(first).items():
        setattr(second, name, weight)
    backward(case, first)
    single = {
        name: (w.main_grad if fused else w.grad).clone() for name, w in weights_of(first).items()
    }
    backward(case, second)
    for name, weight in weights_of(second).items():
        found = weight.main_grad if fused else weight.grad
        assert torch.equal(found, 2 * single[name])


@LAYERS
@pytest.mark.parametrize("way", WAYS)
def test_a_late_gradient_of_a_shard_goes_through_the_very_same_object(case: Case, way: str) -> None:
    module = case.make(delay_wgrad_compute=True)
    shards = shard(module)
    run(case, module, "mxfp8", way)
    assert not any("finalize" in one.asked for one in shards)
    module.backward_dw()
    plain = case.make()
    shard(plain)
    run(case, plain, "mxfp8")
    for one, other in zip(shards, weights_of(plain).values(), strict=True):
        assert one.asked[-1] == "finalize"
        assert torch.equal(one.grad, other.grad)  # pyright: ignore


def test_a_late_gradient_of_a_shard_does_not_share_the_providers_memory() -> None:
    class Reusing(Shard):
        def finalize_group_grads(self, wgrads: Tensor) -> Tensor:
            return self.main_grad.copy_(wgrads)

    module = Linear(H, N, delay_wgrad_compute=True)
    weight = module.weight = Reusing(module.weight.detach()).listen()
    module(torch.ones(1, H)).sum().backward()
    module.backward_dw()
    weight.main_grad.zero_()
    assert torch.equal(weight.grad, torch.ones(N, H))  # pyright: ignore


def test_the_default_returns_the_gradient_to_autograd_in_the_weights_dtype() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    grad = WeightGradient().give(weight, lambda: torch.ones(2, 2))
    assert grad is not None
    assert grad.dtype is torch.bfloat16
    assert Delivery.of(fused=True) is Delivery.MAIN_GRAD
    assert Delivery.of(fused=False) is Delivery.AUTOGRAD


def test_a_queue_runs_what_waits_in_order_and_only_once() -> None:
    queue, ran = GradientQueue(), []
    for number in range(3):
        queue.append(lambda number=number: ran.append(number))
    assert len(queue) == 3
    queue.run()
    queue.run()
    assert ran == [0, 1, 2]
