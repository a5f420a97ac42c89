"""What all layers share: the door check, autocast, and that no hook changes a bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from backstash.errors import DeviceError, DtypeError, LayoutError, ShapeError
from backstash.nn import GroupedLinear, GroupedMLP, LayerNormLinear, LayerNormMLP, Linear
from backstash.nn.layer import as_rows
from backstash.recipes import autocast, quantized_model_init
from nn_cases import CASE_NAMES, CASES, FFN, RECIPES, WAYS, Case, G, H, N, run, weights_of

LAYERS = pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
BF16 = torch.bfloat16


@LAYERS
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "no hook"])
def test_no_hook_and_no_recomputation_changes_a_bit(case: Case, recipe: str, way: str) -> None:
    module = case.make()
    expected = run(case, copy.deepcopy(module), recipe)
    found = run(case, module, recipe, way)
    assert all(map(torch.equal, found, expected))


@LAYERS
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_retained_graph_gives_the_same_gradients_twice(case: Case, recipe: str) -> None:
    module, inputs = case.make(), case.inputs()
    with autocast(recipe=recipe):
        loss = case.call(module, *inputs).square().sum()
    leaves = [*inputs, *module.parameters()]
    once = torch.autograd.grad(loss, leaves, retain_graph=True)
    again = torch.autograd.grad(loss, leaves)
    assert all(map(torch.equal, once, again))


def doubled(y: Any, *, in_place: bool) -> Any:
    if isinstance(y, tuple):
        return tuple(doubled(each, in_place=in_place) for each in y)
    return y.mul_(2) if in_place else y * 2


@LAYERS
@pytest.mark.parametrize("leading", [(), (1,)], ids=["rows", "batch"])
def test_what_a_layer_returns_may_be_changed_in_place(case: Case, leading: tuple[int]) -> None:
    results = []
    for in_place in (True, False):
        module = case.make()
        module.register_forward_hook(lambda *call, here=in_place: doubled(call[-1], in_place=here))
        x, *rest = case.inputs()
        # With ``rows=`` a layer gives rows, whatever the shape of the tokens.
        y = case.call(module, x.reshape(*leading, *x.shape), *rest).flatten(0, -2)
        y.square().sum().backward()
        results.append([y, *(leaf.grad for leaf in (x, *rest, *module.parameters()))])
    assert all(map(torch.equal, *results))


@LAYERS
@pytest.mark.parametrize("recipe", RECIPES)
def test_bfloat16_parameters_make_a_bfloat16_layer(case: Case, recipe: str) -> None:
    module = case.make(dtype=BF16)
    inputs = [x.detach().to(BF16).requires_grad_() for x in case.inputs()]
    with autocast(recipe=recipe):
        y = case.call(module, *inputs)
    y.sum().backward()
    assert y.dtype is BF16
    assert all(p.grad is not None and p.grad.dtype is BF16 for p in module.parameters())
    assert all(x.grad is not None and x.grad.dtype is BF16 for x in inputs)


@LAYERS
def test_inside_torchs_autocast_a_float32_layer_runs_in_its_dtype(case: Case) -> None:
    if case.name == "RMSNormLinear-and-output":
        case = CASES[1]
    module = case.make()
    inputs = case.inputs()
    with torch.autocast("cpu", dtype=BF16):
        y = case.call(module, *inputs)
    assert y.dtype is BF16
    y.float().square().sum().backward()
    plain = case.make()
    case.call(plain, *case.inputs()).square().sum().backward()
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert one.grad.dtype is torch.float32
        # Every sum rounds its terms to bfloat16 a handful of times.
        scale = other.grad.abs().max()  # pyright: ignore
        few = 2 * torch.finfo(BF16).eps
        torch.testing.assert_close(one.grad / scale, other.grad / scale, rtol=few, atol=few)
    assert all(x.grad is not None and x.grad.dtype is torch.float32 for x in inputs)


def test_inside_torchs_autocast_it_is_torchs_linear_bit_for_bit() -> None:
    ours, torchs = Linear(H, N), torch.nn.Linear(H, N)
    torchs.load_state_dict(ours.state_dict())
    x, results = torch.randn(5, H), []
    for module in (ours, torchs):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=BF16):
            y = module(leaf)
        y.float().square().sum().backward()
        results.append([y, leaf.grad, module.weight.grad])
    assert all(map(torch.equal, *results))


@LAYERS
@pytest.mark.parametrize("recipe", ["high_precision", "mxfp8"])
def test_a_backward_inside_torchs_autocast_computes_in_the_dtype_of_forward(
    case: Case, recipe: str
) -> None:
    module = case.make()
    expected = run(case, copy.deepcopy(module), recipe)
    inputs = case.inputs()
    with autocast(recipe=recipe):
        y = case.call(module, *inputs)
    torch.manual_seed(5)
    dy = torch.randn_like(y) / 8
    with torch.autocast("cpu", dtype=BF16):
        y.backward(dy)
    found = [y, *(x.grad for x in inputs), *(p.grad for p in module.parameters())]
    assert all(map(torch.equal, found, expected))


def test_autocast_leaves_float64_alone() -> None:
    module = Linear(H, N, dtype=torch.float64)
    with torch.autocast("cpu", dtype=BF16):
        assert module(torch.randn(2, H, dtype=torch.float64)).dtype is torch.float64


@pytest.mark.parametrize("build", [Linear, LayerNormLinear, LayerNormMLP])
def test_shapes_can_be_had_without_memory(build: Any) -> None:
    x = torch.empty(2, 3, H, device="meta", requires_grad=True)
    y = build(H, N, device="meta")(x)
    y.sum().backward()
    assert y.shape[:2] == (2, 3)
    assert x.grad is not None
    assert x.grad.shape == x.shape


def call(module: Any, x: Any) -> Any:
    grouped = isinstance(module, GroupedLinear | GroupedMLP)
    return module(x, [1] * G) if grouped else module(x)


@LAYERS
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")
def test_an_input_that_is_sparse_or_nested_is_refused_at_the_door(case: Case) -> None:
    module, (x, *rest) = case.make(), case.inputs()
    for odd in (x.detach().to_sparse(), torch.nested.nested_tensor([x.detach()])):
        with pytest.raises(LayoutError, match="needs a dense tensor"):
            case.call(module, odd, *rest)


@LAYERS
def test_an_input_that_does_not_fit_is_refused_at_the_door(case: Case) -> None:
    module = case.make()
    name = type(module).__name__
    for x, error, words in (
        (torch.randn(G, H + 1), ShapeError, f"{name} needs {H} features.*got .4, 21"),
        (torch.randn(()), ShapeError, f"{name} needs {H} features"),
        (torch.randn(G, H, dtype=BF16), DtypeError, "parameters in torch.float32, got.*bfloat16"),
        (torch.ones(G, H, dtype=torch.int64), DtypeError, "needs a floating-point tensor"),
        ([1.0] * H, DtypeError, "needs a floating-point tensor, got list"),
        (torch.randn(G, H, device="meta"), DeviceError, "parameters on cpu, got an input on meta"),
    ):
        with pytest.raises(error, match=words):
            call(module, x)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Linear(H, N),
        lambda: LayerNormLinear(H, N),
        lambda: LayerNormMLP(H, FFN),
        lambda: GroupedLinear(G, H, N),
        lambda: GroupedMLP(G, H, FFN),
    ],
)
@pytest.mark.parametrize("stored", ["mxfp8", "float8_current"])
def test_weights_created_in_low_precision_multiply_and_get_gradients(
    build: Any, stored: str
) -> None:
    with quantized_model_init(stored):
        module = build()
    x = torch.randn(G, H, requires_grad=True)
    with autocast(recipe=stored):
        y = call(module, x)
    y.square().sum().backward()
    assert x.grad is not None
    assert x.grad.any()
    for weight in weights_of(module).values():
        assert type(weight.detach()).__name__ == "QuantizedTensor"
        assert weight.grad is not None
        assert weight.grad.any()


@LAYERS
def test_a_layer_can_be_copied_and_copies_compute_the_same(case: Case) -> None:
    module = case.make()
    expected = run(case, module, "mxfp8")
    assert all(map(torch.equal, run(case, copy.deepcopy(module), "mxfp8"), expected))


def test_rows_keep_their_memory() -> None:
    x = torch.randn(2, 3, H)
    assert as_rows(x).shape == (6, H)
    assert as_rows(x).data_ptr() == x.data_ptr()
    assert as_rows(torch.randn(H)).shape == (1, H)
    assert as_rows(torch.randn(2, 0, H)).shape == (0, H)
