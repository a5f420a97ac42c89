"""Defaults that a user gives torch change nothing: all of ours say their device and dtype.

The default device is ``meta``: what is made on it by mistake has no values, and is noticed.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import backstash as bs
from nn_cases import CASE_NAMES, CASES, RECIPES, Case


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = {
    "none": contextlib.nullcontext,
    "meta": default_device,
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
}


def step(module: Any, given: list[Any], named: dict[str, Any], recipe: str) -> list[Tensor]:
    """Outputs and gradients of one step under a small stash, of fresh copies of all."""
    module = copy.deepcopy(module)
    given = [copy.deepcopy(each) for each in given]
    pool = bs.PagePool(1 << 18, host_bytes=1 << 16, device="cpu", page_bytes=256)
    with bs.autocast(recipe=recipe), bs.saving(bs.Stash(pool, ahead=0)):
        y = module(*given, **named)
    outputs = list(y) if isinstance(y, tuple) else [y]
    torch.autograd.backward(outputs, [torch.ones_like(each) / 8 for each in outputs])
    leaves = [*module.parameters(), *(x for x in given if getattr(x, "is_leaf", False))]
    return [*outputs, *(x.grad for x in leaves if x.grad is not None)]


def assert_equal_under(defaults: str, *arguments: Any) -> None:
    expected = step(*arguments)
    with DEFAULTS[defaults]():
        found = step(*arguments)
    assert len(found) == len(expected) > 1
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("defaults", list(DEFAULTS))
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
def test_a_layer_does_the_same_under_any_default(case: Case, recipe: str, defaults: str) -> None:
    arguments, named = case.arguments()
    x, *others = case.inputs()
    floats = iter(others)
    given = [
        next(floats) if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments
    ]
    assert_equal_under(defaults, case.make(), [x, *given], named, recipe)


@pytest.mark.parametrize("defaults", list(DEFAULTS))
@pytest.mark.parametrize("dispatcher", [bs.Local(), bs.Local(capacity_factor=2.0)], ids=repr)
def test_a_mixture_of_experts_does_the_same_under_any_default(
    dispatcher: bs.Local, defaults: str
) -> None:
    config = bs.RouterConfig(aux_loss_weight=0.01, z_loss_weight=0.01, bias_update_speed=0.1)
    moe = bs.MoE(32, 48, 8, 2, dispatcher=dispatcher, router=config, shared_ffn_hidden_size=16)
    x = torch.randn(33, 32, requires_grad=True)
    assert_equal_under(defaults, moe, [x], {}, "mxfp8")


@pytest.mark.parametrize("defaults", list(DEFAULTS))
def test_layers_are_made_with_the_dtype_and_on_the_device_that_are_given(defaults: str) -> None:
    with DEFAULTS[defaults]():
        made = [case.make(device="cpu", dtype=torch.float32) for case in CASES]
        made.append(bs.MoE(32, 48, 8, 2, device="cpu", dtype=torch.float32))
    for module in made:
        assert {p.dtype for p in module.parameters()} == {torch.float32}
        assert {p.device.type for p in module.parameters()} == {"cpu"}
