"""The products of every format on a GPU, and layers whose sizes its matrix units take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import backstash as bs
from backstash.formats import Code, Format
from backstash.nn import product
from backstash.nn.product import Matmul, Path
from backstash.recipes import autocast, recipe
from format_cases import FORMATS, name_of
from host_reads import no_host_reads
from nn_cases import RECIPES
from nn_references import relative_error
from product_cases import COUNTS, Operands, assert_products, float64_products, magnitudes, operands

pytestmark = pytest.mark.gpu

#: T, K and N that matrix units take, and that they do not; the groups of each.
SIZES = {
    "units": ((304, 96, 160), [100, 0, 7, 190]),
    "odd-rows": ((40, 32, 48), COUNTS),
    "odd-features": ((40, 20, 14), COUNTS),
    "deep": ((520, 2048, 64), [0, 511, 1]),
}
by_size = pytest.mark.parametrize(("sizes", "counts"), SIZES.values(), ids=SIZES)
by_grouping = pytest.mark.parametrize("grouped", [False, True], ids=["dense", "grouped"])
FLOAT8 = (bs.FLOAT8_CURRENT, bs.FLOAT8_DELAYED, bs.FLOAT8_ROWWISE)
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The paths that were taken, in order."""
    paths: list[Path] = []
    choose = product.choose

    def noting(matmul: Matmul) -> Path:
        paths.append(choose(matmul))
        return paths[-1]

    monkeypatch.setattr(product, "choose", noting)
    return paths


def check(ops: Operands) -> None:
    """Each product is that of the decoded values, as near as its rounding allows."""
    terms = (ops.x.shape[1], ops.dy.shape[1], ops.x.shape[0])
    found, wanted, sizes = ops.products(), float64_products(ops), magnitudes(ops)
    for y, right, size, count in zip(found, wanted, sizes, terms, strict=True):
        assert_products(y, right, size, count)


@pytest.mark.parametrize("format", FORMATS, ids=name_of)
@by_size
@by_grouping
def test_the_products_are_those_of_the_decoded_values(
    format: Format,
    sizes: tuple[int, int, int],
    counts: list[int],
    grouped: bool,
    taken: list[Path],
) -> None:
    groups = counts if grouped else None
    check(operands(format, torch.bfloat16, groups, sizes=sizes, device="cuda"))
    fits = sizes[1] % 16 == 0
    if HOPPER and format in FLOAT8:
        assert taken == [Path.FLOAT8 if fits else Path.VALUES] * 3


@pytest.mark.parametrize("format", FORMATS, ids=name_of)
@by_grouping
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_products_have_the_layers_dtype(
    format: Format, grouped: bool, dtype: torch.dtype
) -> None:
    sizes, counts = SIZES["units"]
    check(operands(format, dtype, counts if grouped else None, sizes=sizes, device="cuda"))


@pytest.mark.parametrize("grouped", [False, True], ids=["dense", "grouped"])
def test_gradients_in_e5m2_meet_weights_in_e4m3(grouped: bool, taken: list[Path]) -> None:
    gradient = bs.FLOAT8_CURRENT.__class__(code=Code.E5M2)
    counts = [100, 0, 7, 190] if grouped else None
    check(
        operands(
            bs.FLOAT8_CURRENT,
            torch.bfloat16,
            counts,
            sizes=(304, 96, 160),
            gradient=gradient,
            device="cuda",
        )
    )
    if HOPPER:
        assert taken == [Path.FLOAT8] * 3


# --- layers ------------------------------------------------------------------------------------

H, F, ROWS, SPLIT = 64, 32, 48, [5, 0, 40, 1]
LAYERS: dict[str, tuple[Callable[[], Any], tuple[Any, ...]]] = {
    "Linear": (lambda: bs.Linear(H, F), ()),
    "LayerNormLinear": (lambda: bs.LayerNormLinear(H, F), ()),
    "LayerNormMLP": (lambda: bs.LayerNormMLP(H, F, activation="swiglu"), ()),
    "GroupedLinear": (lambda: bs.GroupedLinear(len(SPLIT), H, F), (SPLIT,)),
    "GroupedMLP": (lambda: bs.GroupedMLP(len(SPLIT), H, F, bias=True), (SPLIT,)),
}
by_layer = pytest.mark.parametrize("layer", LAYERS)
by_recipe = pytest.mark.parametrize("recipe_name", RECIPES)


def step(module: Any, x: Tensor, arguments: tuple[Any, ...], name: str) -> list[Tensor]:
    """Output and gradients of one step; the rows of the tail hold NaN."""
    for leaf in (x, *module.parameters()):
        leaf.grad = None
    with autocast(recipe=name):
        y = module(x, *arguments)
    y.backward(torch.ones_like(y) / 8)
    gradients = [leaf.grad for leaf in (x, *module.parameters())]
    return [y.detach(), *(grad for grad in gradients if grad is not None)]


Made = tuple[Any, Tensor, tuple[Any, ...]]


def made(layer: str) -> Made:
    torch.manual_seed(1)
    build, arguments = LAYERS[layer]
    module = build().to(torch.bfloat16)
    x = torch.randn(ROWS, H).bfloat16()
    if arguments:
        x[sum(SPLIT) :] = float("nan")
        arguments = (torch.tensor(SPLIT, dtype=torch.int32),)
    return module, x.requires_grad_(), arguments


def moved(module: Any, x: Tensor, arguments: tuple[Any, ...]) -> Made:
    x = x.detach().cuda().requires_grad_()
    return module.cuda(), x, tuple(argument.cuda() for argument in arguments)


@by_layer
@by_recipe
def test_a_layer_is_that_of_the_cpu(layer: str, recipe_name: str, taken: list[Path]) -> None:
    module, x, arguments = made(layer)
    # A module that moves takes its gradients along.
    expected = [one.clone() for one in step(module, x, arguments, recipe_name)]
    taken.clear()
    found = step(*moved(module, x, arguments), recipe_name)
    # A value beside the middle of two codes may fall to either.
    tolerance = max(1.6e-2, recipe(recipe_name).gradient.rtol)
    for one, other in zip(found, expected, strict=True):
        assert not one.isnan().any()
        assert relative_error(one.cpu(), other) <= tolerance
    if HOPPER and recipe_name == "float8_rowwise":
        assert set(taken) == {Path.FLOAT8}


@by_layer
@by_recipe
def test_a_step_reads_nothing_on_the_host(layer: str, recipe_name: str) -> None:
    there = moved(*made(layer))
    step(*there, recipe_name)  # kernels are compiled, and ask the device for its properties
    with no_host_reads():
        step(*there, recipe_name)


@by_layer
@pytest.mark.parametrize("recipe_name", [name for name in RECIPES if name != "float8_delayed"])
def test_a_captured_step_gives_the_bits_of_an_eager_one(layer: str, recipe_name: str) -> None:
    module, x, arguments = moved(*made(layer))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(module, x, arguments, recipe_name)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(module, x, arguments, recipe_name)
    for counts in (SPLIT, [40, 1, 0, 0], [0, 0, 0, 0]):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
            if arguments:
                arguments[0].copy_(torch.tensor(counts))
                x[sum(counts) :] = float("nan")
        graph.replay()
        torch.cuda.synchronize()
        found = [tensor.clone() for tensor in captured]
        wanted = step(module, x, arguments, recipe_name)
        assert all(map(torch.equal, found, wanted))


# Torch's own tracer makes an instance of a Function, and warns about it.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("recipe_name", ["float8_current", "float8_rowwise", "mxfp8"])
def test_a_compiled_layer_gives_the_bits_of_an_eager_one(recipe_name: str) -> None:
    torch.compiler.reset()
    module, x, arguments = moved(*made("Linear"))
    wanted = step(module, x, arguments, recipe_name)
    found = step(torch.compile(module, backend="aot_eager"), x, arguments, recipe_name)
    assert all(map(torch.equal, found, wanted))
