"""``backward_override``: forward is that of the recipe, backward reads what the override says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from backstash.formats import Usage
from backstash.nn import GroupedLinear, Linear
from backstash.recipes import Operand, Phase, Recipe, Role, autocast, quantized_model_init, recipe
from backstash.saving import Meter, saving
from backstash.tensors import GroupedTensor
from nn_cases import CASE_NAMES, CASES, LOW_PRECISION, WAYS, Case, H, N, run

SHAPES = [(3, 10, H), (64, H), (1, H), (0, H)]
SPLITS = [[64, 0, 32, 32], [1, 31, 0, 64]]

by_recipe = pytest.mark.parametrize("name", LOW_PRECISION)
by_override = pytest.mark.parametrize("override", ["high_precision", "dequantized"])


def step(module: Any, x: Tensor, dy: Tensor, chosen: Recipe | str, *counts: Any) -> list[Any]:
    """y and the gradients of x and the weight, of a copy that has learnt no scale yet."""
    module = copy.deepcopy(module)
    x = x.clone().requires_grad_()
    with autocast(recipe=chosen):
        y = module(x, *counts)
    y.backward(dy)
    return [y.detach(), x.grad, module.weight.grad]


def rows_of(name: str, operand: Operand, x: Tensor, counts: list[int] | None = None) -> Tensor:
    """What forward reads."""
    format = recipe(name).format(Role(operand, Phase.FORWARD, "Linear"))
    if counts is None:
        return format.quantize(x.detach()).dequantize()
    return format.quantize(GroupedTensor.from_counts(x.detach(), counts)).data.dequantize()


@by_recipe
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_high_precision_gives_the_gradients_of_the_plain_layer(name: str, shape: Any) -> None:
    module, x, dy = Linear(H, N), torch.randn(shape), torch.randn(*shape[:-1], N)
    y, dx, dw = step(module, x, dy, recipe(name, backward_override="high_precision"))
    _, plain_dx, plain_dw = step(module, x, dy, "high_precision")
    assert torch.equal(y, step(module, x, dy, name)[0])
    assert torch.equal(dx, plain_dx)
    assert torch.equal(dw, plain_dw)


@by_recipe
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dequantized_multiplies_what_forward_read(name: str, shape: Any) -> None:
    module, x, dy = Linear(H, N), torch.randn(shape), torch.randn(*shape[:-1], N)
    y, dx, dw = step(module, x, dy, recipe(name, backward_override="dequantized"))
    assert torch.equal(y, step(module, x, dy, name)[0])
    assert torch.equal(dx, dy @ rows_of(name, Operand.WEIGHT, module.weight))
    x_rows = rows_of(name, Operand.INPUT, x).flatten(0, -2)
    assert torch.equal(dw, dy.flatten(0, -2).t() @ x_rows)


@by_recipe
@by_override
@pytest.mark.parametrize("counts", SPLITS, ids=str)
def test_groups_read_the_same(name: str, override: str, counts: list[int]) -> None:
    module, rows = GroupedLinear(4, H, N), sum(counts)
    x, dy = torch.randn(rows, H), torch.randn(rows, N)
    y, dx, dw = step(module, x, dy, recipe(name, backward_override=override), counts)
    assert torch.equal(y, step(module, x, dy, name, counts)[0])
    if override == "high_precision":
        _, plain_dx, plain_dw = step(module, x, dy, "high_precision", counts)
        assert torch.equal(dx, plain_dx)
        assert torch.equal(dw, plain_dw)
        return
    read = GroupedLinear(4, H, N)
    with torch.no_grad():
        weight = rows_of(name, Operand.WEIGHT, module.weight.flatten(0, 1), [N] * 4)
        read.weight.copy_(weight.view_as(module.weight))
    x_rows = rows_of(name, Operand.INPUT, x, counts)
    _, wanted_dx, wanted_dw = step(read, x_rows, dy, "high_precision", counts)
    assert torch.equal(dx, wanted_dx)
    assert torch.equal(dw, wanted_dw)


@by_recipe
def test_what_is_kept_is_the_input_or_its_rows(name: str) -> None:
    module, x = Linear(H, N), torch.randn(37, H)
    format = recipe(name).input
    wanted = {
        "high_precision": x.nbytes,
        "dequantized": format.saved_bytes(37, H, x.dtype, Usage.ROWWISE),
    }
    for override, nbytes in wanted.items():
        meter = Meter()
        with autocast(recipe=recipe(name, backward_override=override)), saving(meter):
            y = module(x)
        assert meter.bytes == nbytes
        del y


@by_override
@pytest.mark.parametrize("way", [way for way in WAYS if way != "no hook"])
@pytest.mark.parametrize("name", ["nvfp4", "float8_delayed"])
@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
def test_every_way_of_saving_gives_the_same_bits(
    case: Case, name: str, way: str, override: str
) -> None:
    chosen: Any = recipe(name, backward_override=override)
    wanted = run(case, case.make(), chosen)
    found = run(case, case.make(), chosen, way)
    assert all(map(torch.equal, found, wanted))


@by_override
def test_it_can_be_switched_between_steps(override: str) -> None:
    module, x, dy = Linear(H, N), torch.randn(33, H), torch.randn(33, N)
    gradients = []
    for chosen in ("mxfp8", recipe("mxfp8", backward_override=override), "mxfp8"):
        module.zero_grad()
        with autocast(recipe=chosen):
            module(x).backward(dy)
        gradients.append(module.weight.grad)
    assert torch.equal(gradients[0], gradients[2])
    assert not torch.equal(gradients[0], gradients[1])


@by_override
@pytest.mark.parametrize("name", [n for n in LOW_PRECISION if n != "float8_delayed"])
def test_a_weight_in_low_precision_is_read_along_the_rows(name: str, override: str) -> None:
    with quantized_model_init(name):
        module = Linear(H, N)
    x, dy = torch.randn(33, H).requires_grad_(), torch.randn(33, N)
    with autocast(recipe=recipe(name, backward_override=override)):
        module(x).backward(dy)
    weight: Any = module.weight
    assert x.grad is not None
    assert torch.equal(x.grad, dy @ weight.dequantize(Usage.ROWWISE))


@by_override
# A learnt scale is not the same in backward.
@pytest.mark.parametrize("name", [name for name in LOW_PRECISION if name != "float8_delayed"])
def test_the_original_input_gives_the_same_bits(name: str, override: str) -> None:
    module, kept = Linear(H, N), Linear(H, N, save_original_input=True)
    kept.load_state_dict(module.state_dict())
    x, dy = torch.randn(33, H), torch.randn(33, N)
    chosen = recipe(name, backward_override=override)
    found = step(kept, x, dy, chosen)
    assert all(map(torch.equal, found, step(module, x, dy, chosen)))
