"""``Linear`` computes what its definition says, and keeps what its formula says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from backstash.errors import RecipeError, SecondOrderError
from backstash.formats import Usage
from backstash.nn import Linear
from backstash.recipes import Operand, Phase, Role, autocast
from backstash.recipes import recipe as recipe_named
from backstash.saving import Meter, saving
from nn_cases import LOW_PRECISION, RECIPES, ROWS, H, N
from nn_references import Linears, assert_gradients, relative_error

STATELESS = [name for name in RECIPES if name != "float8_delayed"]


def step(module: Any, x: Tensor, dy: Tensor, recipe: str = "high_precision") -> list[Any]:
    with autocast(recipe=recipe):
        y = module(x)
    y.backward(dy)
    grads = [x.grad, module.weight.grad] + ([module.bias.grad] if module.bias is not None else [])
    return [y.detach(), *grads]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("rows", [1, 37, 64])
def test_every_result_is_that_of_the_definition(recipe: str, bias: bool, rows: int) -> None:
    module = Linear(H, N, bias=bias)
    x, dy = torch.randn(rows, H, requires_grad=True), torch.randn(rows, N) / 8
    found = step(module, x, dy, recipe)
    model = Linears(recipe)
    y = model.forward(x, module.weight, module.bias)
    expected = [y, *model.backward(dy, x, module.weight)]
    assert_gradients(found, expected if bias else expected[:3])


@pytest.mark.parametrize("recipe", LOW_PRECISION)
def test_low_precision_stays_within_the_format_of_high_precision(recipe: str) -> None:
    module = Linear(64, 32)
    x, dy = torch.randn(96, 64, requires_grad=True), torch.randn(96, 32)
    plain = step(copy.deepcopy(module), x.detach().requires_grad_(), dy)
    low = step(module, x, dy, recipe)
    for one, other in zip(low, plain, strict=True):
        assert relative_error(one, other) <= recipe_named(recipe).gradient.rtol


def _format(name: str, role: Role) -> Any:
    return recipe_named(name).format(role)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(ROWS, H), (3, 4, H), (H,), (0, H), (2, 0, H)], ids=str)
def test_without_a_recipe_it_is_torchs_linear_bit_for_bit(dtype: Any, shape: Any) -> None:
    module, torchs = Linear(H, N, dtype=dtype), torch.nn.Linear(H, N, dtype=dtype)
    torchs.load_state_dict(module.state_dict(), strict=True)
    x, dy = torch.randn(shape, dtype=dtype), torch.randn(*shape[:-1], N, dtype=dtype)
    found, expected = (step(m, x.clone().requires_grad_(), dy) for m in (module, torchs))
    for one, other in zip(found[:3], expected[:3], strict=True):
        assert torch.equal(one, other)
    # Ours is summed in float32, so it may be the better one of the two.
    torch.testing.assert_close(found[3], expected[3])


def test_the_bias_gradient_is_summed_in_float32() -> None:
    module = Linear(2, 1, dtype=torch.bfloat16)
    dy = torch.full((300, 1), 1.0, dtype=torch.bfloat16)
    dy[0] = 256.0
    module(torch.ones(300, 2, dtype=torch.bfloat16)).backward(dy)
    assert module.bias is not None
    assert module.bias.grad is not None
    assert module.bias.grad.item() == torch.tensor(555.0, dtype=torch.bfloat16).item()


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_rows_give_no_output_and_exact_zero_gradients(recipe: str) -> None:
    module = Linear(H, N)
    x = torch.randn(0, H, requires_grad=True)
    y, dx, dw, db = step(module, x, torch.randn(0, N), recipe)
    assert y.shape == (0, N)
    assert dx.shape == (0, H)
    assert not dw.any()
    assert not db.any()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("columns", [(H, 1), (1, N), (1, 1)], ids=str)
def test_a_single_feature_works(recipe: str, columns: tuple[int, int]) -> None:
    module = Linear(*columns)
    x = torch.randn(5, columns[0], requires_grad=True)
    assert all(g.isfinite().all() for g in step(module, x, torch.randn(5, columns[1]), recipe))


@pytest.mark.parametrize("original", [False, True], ids=["columns", "original"])
@pytest.mark.parametrize("name", STATELESS)
def test_what_is_saved_is_the_input_in_its_format(name: str, original: bool) -> None:
    module = Linear(H, N, save_original_input=original)
    x = torch.randn(ROWS, H, requires_grad=True)
    meter = Meter()
    with autocast(recipe=name), saving(meter):
        y = module(x)
    format = _format(name, Role(Operand.INPUT, Phase.BACKWARD, "Linear"))
    columns = format.saved_bytes(ROWS, H, x.dtype, Usage.COLUMNWISE)
    assert meter.bytes == (x.nbytes if original else columns)
    y.sum().backward()


def test_a_frozen_weight_keeps_no_input() -> None:
    module = Linear(H, N).requires_grad_(False)
    meter = Meter()
    x = torch.randn(ROWS, H, requires_grad=True)
    with saving(meter):
        y = module(x)
    y.backward(torch.ones_like(y))
    assert meter.bytes == 0
    assert x.grad is not None
    assert module.weight.grad is None


def test_a_frozen_input_has_no_gradient_computed() -> None:
    module = Linear(H, N)
    x, dy = torch.randn(ROWS, H), torch.randn(ROWS, N) / 8
    module(x).backward(dy)
    _, dw, db = Linears("high_precision").backward(dy, x, module.weight)
    assert x.grad is None
    assert module.bias is not None
    assert_gradients([module.weight.grad, module.bias.grad], [dw, db])


def test_a_bias_alone_can_be_trained_and_keeps_nothing() -> None:
    module = Linear(H, N)
    module.weight.requires_grad_(False)
    meter = Meter()
    with saving(meter):
        module(torch.randn(ROWS, H)).sum().backward()
    assert meter.calls == 0
    assert module.bias is not None
    assert torch.equal(module.bias.grad, torch.full((N,), float(ROWS)))  # pyright: ignore


@pytest.mark.parametrize("recipe", STATELESS)
def test_the_original_input_gives_the_same_bits_as_its_columns(recipe: str) -> None:
    module = Linear(H, N)
    original = Linear(H, N, save_original_input=True)
    original.load_state_dict(module.state_dict())
    x, dy = torch.randn(2, ROWS, H), torch.randn(2, ROWS, N)
    found, expected = (step(m, x.clone().requires_grad_(), dy, recipe) for m in (original, module))
    assert all(map(torch.equal, found, expected))


def test_the_original_input_is_refused_where_the_scale_is_learnt() -> None:
    module = Linear(H, N, save_original_input=True)
    with (
        autocast(recipe="float8_delayed"),
        pytest.raises(RecipeError, match=r"save_original_input.*'float8_delayed'"),
    ):
        module(torch.randn(ROWS, H))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_saved_and_the_output_is_the_same(
    recipe: str, mode: Any
) -> None:
    module, x = Linear(H, N), torch.randn(ROWS, H)
    with autocast(recipe=recipe):
        # A copy, because delayed scaling learns from a call that may be trained.
        expected = copy.deepcopy(module)(x)
    meter = Meter()
    with autocast(recipe=recipe), saving(meter), mode():
        y = module(x)
    assert torch.equal(y, expected)
    assert not y.requires_grad
    assert meter.calls == 0


def test_a_second_backward_of_a_retained_graph_adds_the_same_gradient() -> None:
    module, x = Linear(H, N), torch.randn(ROWS, H, requires_grad=True)
    with autocast(recipe="mxfp8"):
        loss = module(x).square().sum()
    loss.backward(retain_graph=True)
    once = [x.grad.clone(), module.weight.grad.clone()]  # pyright: ignore
    loss.backward()
    assert torch.equal(x.grad, 2 * once[0])  # pyright: ignore
    assert torch.equal(module.weight.grad, 2 * once[1])  # pyright: ignore


def test_differentiating_twice_is_an_error() -> None:
    module, x = Linear(H, N), torch.randn(ROWS, H, requires_grad=True)
    (dx,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    with pytest.raises(SecondOrderError, match="differentiated twice"):
        dx.sum().backward()


def test_state_dicts_are_those_of_torchs_linear_both_ways() -> None:
    for bias in (True, False):
        ours, torchs = Linear(H, N, bias=bias), torch.nn.Linear(H, N, bias=bias)
        torchs.load_state_dict(ours.state_dict(), strict=True)
        ours.load_state_dict(torchs.state_dict(), strict=True)
        assert list(ours.state_dict()) == list(torchs.state_dict())


def test_parameters_are_drawn_as_torchs_linear_draws_them() -> None:
    torch.manual_seed(7)
    torchs = torch.nn.Linear(H, N)
    torch.manual_seed(7)
    ours = Linear(H, N)
    torch.testing.assert_close(ours.weight, torchs.weight)
    torch.testing.assert_close(ours.bias, torchs.bias)


def test_it_prints_its_sizes() -> None:
    assert repr(Linear(3, 4)) == "Linear(in_features=3, out_features=4, bias=True)"
