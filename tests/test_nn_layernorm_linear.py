"""``LayerNormLinear`` computes what its definition says and saves one input for both halves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from backstash.errors import ConfigError
from backstash.nn import LayerNormLinear
from backstash.recipes import autocast
from backstash.recipes import recipe as recipe_named
from backstash.saving import Meter, saving
from nn_cases import LOW_PRECISION, RECIPES, ROWS, H, N
from nn_references import Linears, assert_gradients, double, normalize, relative_error

KINDS = pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
NORM_BYTES = {"LayerNorm": 2 * 4 * ROWS, "RMSNorm": 4 * ROWS}


def build(normalization: str, **options: Any) -> LayerNormLinear:
    module = LayerNormLinear(H, N, normalization=normalization, **options)
    with torch.no_grad():
        module.layer_norm_weight.uniform_(0.5, 1.5)
        if module.layer_norm_bias is not None:
            module.layer_norm_bias.uniform_(-0.5, 0.5)
    return module


def reference(
    module: LayerNormLinear, x: Tensor, dy: Tensor, dnormalized: Tensor | None, recipe: str
) -> list[Tensor]:
    """y, dx and the gradients of all parameters, in the order of ``module.parameters()``."""
    x64, *norm = double(x, module.layer_norm_weight, module.layer_norm_bias)
    norm_bias = norm[1] if len(norm) > 1 else None
    normalized = normalize(x64, norm[0], norm_bias, module.normalization.eps)
    linears = Linears(recipe)
    y = linears.forward(normalized, module.weight, module.bias)
    dx, dw, db = linears.backward(dy, normalized, module.weight)
    normalized.backward(dx if dnormalized is None else dx + dnormalized.double())
    grads = [x64.grad, *(n.grad for n in norm), dw, *([db] if module.bias is not None else [])]
    return [y, *grads]  # pyright: ignore


def step(
    module: LayerNormLinear, x: Tensor, dy: Tensor, dnormalized: Tensor | None, recipe: str
) -> list[Any]:
    with autocast(recipe=recipe):
        y = module(x)
    outputs, grads = ([*y], [dy, dnormalized]) if isinstance(y, tuple) else ([y], [dy])
    torch.autograd.backward(outputs, grads)
    return [outputs[0].detach(), x.grad, *(p.grad for p in module.parameters())]


@KINDS
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("returned", [True, False], ids=["both outputs", "one output"])
def test_every_result_is_that_of_the_definition(
    normalization: str, recipe: str, bias: bool, returned: bool
) -> None:
    module = build(normalization, bias=bias, return_layernorm_output=returned)
    x, dy = torch.randn(ROWS, H, requires_grad=True), torch.randn(ROWS, N) / 8
    dnormalized = torch.randn(ROWS, H) / 8 if returned else None
    found = step(module, x, dy, dnormalized, recipe)
    assert_gradients(found, reference(module, x, dy, dnormalized, recipe))


@KINDS
@pytest.mark.parametrize("recipe", LOW_PRECISION)
def test_low_precision_stays_within_the_format_of_high_precision(
    normalization: str, recipe: str
) -> None:
    module = build(normalization)
    x, dy = torch.randn(ROWS, H), torch.randn(ROWS, N)
    plain = step(copy.deepcopy(module), x.clone().requires_grad_(), dy, None, "high_precision")
    low = step(module, x.clone().requires_grad_(), dy, None, recipe)
    for one, other in zip(low, plain, strict=True):
        assert relative_error(one, other) <= recipe_named(recipe).gradient.rtol


@KINDS
def test_the_returned_output_is_the_normalized_input(normalization: str) -> None:
    module = build(normalization, return_layernorm_output=True)
    x = torch.randn(2, 3, H)
    y, normalized = module(x)
    assert y.shape == (2, 3, N)
    torch.testing.assert_close(
        normalized,
        normalize(x, module.layer_norm_weight, module.layer_norm_bias, module.normalization.eps),
    )
    assert torch.equal(y, F.linear(normalized, module.weight, module.bias))


@KINDS
@pytest.mark.parametrize("unused", [0, 1])
def test_one_of_two_outputs_may_be_unused(normalization: str, unused: int) -> None:
    module = build(normalization, return_layernorm_output=True)
    x = torch.randn(ROWS, H, requires_grad=True)
    outputs = module(x)
    gradient = torch.randn_like(outputs[1 - unused]) / 8
    outputs[1 - unused].backward(gradient)
    dy = torch.zeros(ROWS, N) if unused == 0 else gradient
    dnormalized = torch.zeros(ROWS, H) if unused == 1 else gradient
    _, *expected = reference(module, x, dy, dnormalized, "high_precision")
    assert_gradients([x.grad, *(p.grad for p in module.parameters())], expected)


@KINDS
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_saved_is_the_input_and_its_statistics(normalization: str, recipe: str) -> None:
    module = build(normalization)
    x = torch.randn(ROWS, H, requires_grad=True)
    meter = Meter()
    with autocast(recipe=recipe), saving(meter):
        y = module(x)
    assert meter.bytes == x.nbytes + NORM_BYTES[normalization]
    y.sum().backward()


@KINDS
def test_frozen_parts_get_no_gradient_and_the_rest_the_same_one(normalization: str) -> None:
    module = build(normalization)
    x, dy = torch.randn(ROWS, H), torch.randn(ROWS, N) / 8
    dx = x.clone().requires_grad_()
    _, *expected = reference(module, x, dy, None, "high_precision")
    step(module, dx, dy, None, "high_precision")
    names = [name for name, _ in module.named_parameters()]
    for trained in names:
        frozen = copy.deepcopy(module)
        frozen.zero_grad()
        for name, parameter in frozen.named_parameters():
            parameter.requires_grad_(name == trained)
        frozen(x).backward(dy)
        grads = {name: p.grad for name, p in frozen.named_parameters() if p.grad is not None}
        assert list(grads) == [trained]
        assert_gradients([grads[trained]], [expected[1 + names.index(trained)]])


def test_a_bias_alone_can_be_trained_and_keeps_nothing() -> None:
    module = build("LayerNorm").requires_grad_(False)
    assert module.bias is not None
    module.bias.requires_grad_(True)
    meter = Meter()
    with saving(meter):
        module(torch.randn(ROWS, H)).sum().backward()
    assert meter.calls == 0
    assert torch.equal(module.bias.grad, torch.full((N,), float(ROWS)))  # pyright: ignore


@KINDS
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(0, H), (2, 0, H), (H,), (2, 3, H)], ids=str)
def test_any_leading_dimensions_work(normalization: str, recipe: str, shape: Any) -> None:
    module = build(normalization)
    x = torch.randn(shape, requires_grad=True)
    with autocast(recipe=recipe):
        y = module(x)
    assert y.shape == (*shape[:-1], N)
    y.square().sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    if not x.numel():
        assert not any(p.grad.any() for p in module.parameters() if p.grad is not None)


@KINDS
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_saved(normalization: str, mode: Any) -> None:
    module, x, meter = build(normalization), torch.randn(ROWS, H), Meter()
    expected = module(x)
    with saving(meter), mode():
        y = module(x)
    assert torch.equal(y, expected)
    assert meter.calls == 0


@KINDS
def test_state_dicts_are_those_of_a_norm_and_a_linear(normalization: str) -> None:
    module = build(normalization)
    norm = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}[normalization](H)
    linear = torch.nn.Linear(H, N)
    state = module.state_dict()
    linear.load_state_dict({k: state[k] for k in ("weight", "bias")}, strict=True)
    norm.load_state_dict(
        {k[len("layer_norm_") :]: v for k, v in state.items() if k.startswith("layer_norm_")},
        strict=True,
    )
    back = {f"layer_norm_{k}": v for k, v in norm.state_dict().items()} | linear.state_dict()
    assert set(back) == set(state)
    module.load_state_dict(back, strict=True)


def test_an_unknown_normalization_is_refused() -> None:
    with pytest.raises(ConfigError, match="one of LayerNorm, RMSNorm, got 'BatchNorm'"):
        LayerNormLinear(H, N, normalization="BatchNorm")


def test_it_prints_its_sizes() -> None:
    assert "in_features=20, out_features=14, bias=True, normalization=RMSNorm" in repr(
        build("RMSNorm")
    )
