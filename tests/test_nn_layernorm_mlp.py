"""``LayerNormMLP`` computes what its definition says and keeps an input and a pre-activation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from backstash import kernels
from backstash.errors import ConfigError
from backstash.formats import MXFP8
from backstash.nn import LayerNormMLP
from backstash.recipes import autocast
from backstash.recipes import recipe as recipe_named
from backstash.saving import Meter, saving
from nn_cases import FFN, LOW_PRECISION, RECIPES, ROWS, H
from nn_references import Linears, activate, assert_gradients, double, normalize, relative_error

ACTIVATIONS = pytest.mark.parametrize("activation", kernels.ACTIVATIONS)


def build(activation: str = "gelu", **options: Any) -> LayerNormMLP:
    module = LayerNormMLP(H, FFN, activation=activation, **options)
    with torch.no_grad():
        module.layer_norm_weight.uniform_(0.5, 1.5)
        if module.layer_norm_bias is not None:
            module.layer_norm_bias.uniform_(-0.5, 0.5)
    return module


def reference(module: LayerNormMLP, x: Tensor, dy: Tensor, recipe: str) -> list[Tensor]:
    """y, dx and the gradients of all parameters, in the order of ``module.parameters()``."""
    x64, *norm = double(x, module.layer_norm_weight, module.layer_norm_bias)
    linears = Linears(recipe)
    normalized = normalize(
        x64, norm[0], norm[1] if len(norm) > 1 else None, module.normalization.eps
    )
    h = linears.forward(normalized, module.fc1_weight, module.fc1_bias).requires_grad_()
    a = activate(h, module.activation)
    y = linears.forward(a, module.fc2_weight, module.fc2_bias)
    da, dw2, db2 = linears.backward(dy, a, module.fc2_weight)
    a.backward(da)
    assert h.grad is not None
    dnormalized, dw1, db1 = linears.backward(h.grad, normalized, module.fc1_weight)
    normalized.backward(dnormalized)
    biases = module.fc1_bias is not None
    weights = [dw1, db1, dw2, db2] if biases else [dw1, dw2]
    return [y, x64.grad, *(n.grad for n in norm), *weights]  # pyright: ignore


def step(module: LayerNormMLP, x: Tensor, dy: Tensor, recipe: Any) -> list[Any]:
    with autocast(recipe=recipe):
        y = module(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


@ACTIVATIONS
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_result_is_that_of_the_definition(activation: str, recipe: str) -> None:
    module = build(activation)
    x, dy = torch.randn(ROWS, H, requires_grad=True), torch.randn(ROWS, H) / 8
    found = step(module, x, dy, recipe)
    assert_gradients(found, reference(module, x, dy, recipe))


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_works_with_another_norm_and_without_biases(recipe: str) -> None:
    module = build("swiglu", normalization="RMSNorm", bias=False)
    x, dy = torch.randn(ROWS, H, requires_grad=True), torch.randn(ROWS, H) / 8
    found = step(module, x, dy, recipe)
    assert_gradients(found, reference(module, x, dy, recipe))


@pytest.mark.parametrize("recipe", LOW_PRECISION)
def test_low_precision_stays_within_the_format_of_high_precision(recipe: str) -> None:
    module = build("swiglu")
    x, dy = torch.randn(ROWS, H), torch.randn(ROWS, H)
    plain = step(copy.deepcopy(module), x.clone().requires_grad_(), dy, "high_precision")
    low = step(module, x.clone().requires_grad_(), dy, recipe)
    for one, other in zip(low, plain, strict=True):
        assert relative_error(one, other) <= recipe_named(recipe).gradient.rtol


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_what_is_saved_is_the_input_its_statistics_and_the_preactivation(
    activation: str, recipe: str
) -> None:
    module = build(activation)
    x = torch.randn(ROWS, H, requires_grad=True)
    meter = Meter()
    with autocast(recipe=recipe), saving(meter):
        y = module(x)
    columns = FFN * (2 if activation == "swiglu" else 1)
    assert meter.bytes == x.nbytes + 2 * 4 * ROWS + 4 * ROWS * columns
    y.sum().backward()


def test_the_preactivation_can_be_kept_in_low_precision() -> None:
    low = recipe_named("high_precision", preactivation=MXFP8)
    module = build("swiglu")
    x, dy = torch.randn(ROWS, H), torch.randn(ROWS, H) / 8
    plain = step(copy.deepcopy(module), x.clone().requires_grad_(), dy, "high_precision")
    meter = Meter()
    with saving(meter):
        found = step(module, x.clone().requires_grad_(), dy, low)
    h_bytes = MXFP8.saved_bytes(ROWS, 2 * FFN, torch.float32)
    assert meter.bytes == x.nbytes + 2 * 4 * ROWS + h_bytes
    assert torch.equal(found[0], plain[0])
    for one, other in zip(found, plain, strict=True):
        assert relative_error(one, other) <= MXFP8.rtol


def test_frozen_parts_get_no_gradient_and_the_rest_the_same_one() -> None:
    module = build("swiglu")
    x, dy = torch.randn(ROWS, H), torch.randn(ROWS, H) / 8
    _, _, *expected = reference(module, x, dy, "high_precision")
    names = [name for name, _ in module.named_parameters()]
    for trained in names:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name == trained)
            parameter.grad = None
        module(x).backward(dy)
        grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        assert list(grads) == [trained]
        assert_gradients([grads[trained]], [expected[names.index(trained)]])


def test_a_frozen_module_keeps_no_columns_and_gives_the_input_gradient() -> None:
    module = build("swiglu").requires_grad_(False)
    x, dy = torch.randn(ROWS, H, requires_grad=True), torch.randn(ROWS, H) / 8
    found = step(module, x, dy, "high_precision")
    _, dx, *_ = reference(module, x, dy, "high_precision")
    assert_gradients([found[1]], [dx])
    assert found[2:] == [None] * 6


def test_the_last_bias_alone_can_be_trained_and_keeps_nothing() -> None:
    module = build().requires_grad_(False)
    assert module.fc2_bias is not None
    module.fc2_bias.requires_grad_(True)
    meter = Meter()
    with saving(meter):
        module(torch.randn(ROWS, H)).sum().backward()
    assert meter.calls == 0
    assert torch.equal(module.fc2_bias.grad, torch.full((H,), float(ROWS)))  # pyright: ignore


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(0, H), (2, 0, H), (H,), (2, 3, H)], ids=str)
def test_any_leading_dimensions_work(recipe: str, shape: Any) -> None:
    module = build("swiglu")
    x = torch.randn(shape, requires_grad=True)
    y, dx, *grads = step(module, x, torch.ones(shape), recipe)
    assert y.shape == dx.shape == x.shape
    if not x.numel():
        assert not any(g.any() for g in grads)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_saved(mode: Any) -> None:
    module, x, meter = build(), torch.randn(ROWS, H), Meter()
    expected = module(x)
    with saving(meter), mode():
        y = module(x)
    assert torch.equal(y, expected)
    assert meter.calls == 0


def test_the_state_dict_names_both_linears() -> None:
    module = build("swiglu")
    shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    assert shapes == {
        "layer_norm_weight": (H,),
        "layer_norm_bias": (H,),
        "fc1_weight": (2 * FFN, H),
        "fc1_bias": (2 * FFN,),
        "fc2_weight": (H, FFN),
        "fc2_bias": (H,),
    }
    build("swiglu").load_state_dict(module.state_dict(), strict=True)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"one of gelu, relu.*, got 'tanh'"):
        LayerNormMLP(H, FFN, activation="tanh")


def test_it_prints_its_sizes() -> None:
    assert "hidden_size=20, ffn_hidden_size=18, bias=True, activation='gelu'" in repr(build())
