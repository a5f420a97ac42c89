"""``GroupedLinear`` is G linear layers, whatever their sizes, and never reads its tail."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from backstash.errors import ConfigError, DeviceError, DtypeError, RecipeError, ShapeError
from backstash.formats import Usage
from backstash.nn import GroupedLinear
from backstash.recipes import Operand, Phase, Role, autocast
from backstash.recipes import recipe as recipe_named
from backstash.saving import Meter, saving, valid_rows
from nn_cases import LOW_PRECISION, RECIPES, H, N
from nn_references import Linears, assert_gradients, relative_error

SPLITS = pytest.mark.parametrize(
    "counts",
    [[5, 0, 31, 1], [0, 0, 37, 0], [37, 0, 0, 0], [0, 0, 0, 0], [31, 33, 1, 0], [0, 1, 1, 63]],
    ids=str,
)
STATELESS = [name for name in RECIPES if name != "float8_delayed"]
TAIL, G, NAN = 3, 4, float("nan")


def build(**options: Any) -> GroupedLinear:
    return GroupedLinear(G, H, N, **options)


def step(module: GroupedLinear, x: Tensor, counts: Any, dy: Tensor, recipe: str) -> list[Any]:
    x = x.clone().requires_grad_()
    with autocast(recipe=recipe):
        y = module(x, counts)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


@SPLITS
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_every_result_is_that_of_the_definition(counts: list[int], recipe: str, bias: bool) -> None:
    module = build(bias=bias)
    rows = sum(counts) + TAIL
    x, dy = torch.randn(rows, H), torch.randn(rows, N) / 8
    found = step(module, x, counts, dy, recipe)
    model = Linears(recipe, counts)
    y = model.forward(x, module.weight, module.bias)
    expected = [y, *model.backward(dy, x, module.weight)]
    assert_gradients(found, expected if bias else expected[:3])
    empty = torch.tensor(counts) == 0
    assert not found[2][empty].any()


@pytest.mark.parametrize("recipe", LOW_PRECISION)
def test_low_precision_stays_within_the_format_of_high_precision(recipe: str) -> None:
    module, counts = build(), [40, 0, 24, 33]
    x, dy = torch.randn(97, H), torch.randn(97, N)
    plain = step(copy.deepcopy(module), x, counts, dy, "high_precision")
    for one, other in zip(step(module, x, counts, dy, recipe), plain, strict=True):
        assert relative_error(one, other) <= recipe_named(recipe).gradient.rtol


def test_it_is_a_linear_for_each_group() -> None:
    module, counts = build(), [5, 0, 31, 1]
    x = torch.randn(37, H)
    y = module(x, counts)
    assert module.bias is not None
    for g, rows in enumerate(x.split(counts)):
        expected = torch.nn.functional.linear(rows, module.weight[g], module.bias[g])
        torch.testing.assert_close(y.split(counts)[g], expected)


@pytest.mark.parametrize(
    ("recipe", "original"), [(r, False) for r in RECIPES] + [(r, True) for r in STATELESS]
)
@pytest.mark.parametrize("counts", [[5, 0, 31, 1], [0, 0, 0, 0]], ids=str)
def test_nan_in_the_tail_changes_nothing(recipe: str, original: bool, counts: list[int]) -> None:
    module = build(save_original_input=original)
    rows = sum(counts) + TAIL
    x, dy = torch.randn(rows, H), torch.randn(rows, N)
    clean = step(copy.deepcopy(module), x, counts, dy, recipe)
    x[-TAIL:], dy[-TAIL:] = NAN, NAN
    poisoned = step(module, x, counts, dy, recipe)
    assert all(map(torch.equal, poisoned, clean))
    assert not poisoned[0][-TAIL:].any()
    assert not poisoned[1][-TAIL:].any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_counts_give_the_same_bits_in_any_form(recipe: str) -> None:
    module, counts = build(), [5, 0, 31, 1]
    x, dy = torch.randn(40, H), torch.randn(40, N)
    expected = step(copy.deepcopy(module), x, counts, dy, recipe)
    for dtype in (torch.int32, torch.int64, torch.int16):
        given = torch.tensor(counts, dtype=dtype)
        assert all(map(torch.equal, step(copy.deepcopy(module), x, given, dy, recipe), expected))


def test_rows_over_the_capacity_are_cut_off() -> None:
    module, x, dy = build(), torch.randn(10, H), torch.randn(10, N)
    found = step(copy.deepcopy(module), x, torch.tensor([4, 3, 20, 5]), dy, "mxfp8")
    expected = step(module, x, [4, 3, 3, 0], dy, "mxfp8")
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("recipe", STATELESS)
@pytest.mark.parametrize("original", [False, True], ids=["columns", "original"])
def test_what_is_saved_is_the_input_in_its_format(recipe: str, original: bool) -> None:
    module = build(save_original_input=original)
    x = torch.randn(40, H, requires_grad=True)
    meter = Meter()
    with autocast(recipe=recipe), saving(meter):
        y = module(x, [5, 0, 31, 1])
    format = recipe_named(recipe).format(Role(Operand.INPUT, Phase.BACKWARD, "GroupedLinear"))
    columns = format.saved_bytes(40, H, x.dtype, Usage.COLUMNWISE, groups=G)
    ends = 4 * G
    assert meter.bytes == (x.nbytes if original else columns) + ends
    y.sum().backward()


@pytest.mark.parametrize("original", [False, True], ids=["columns", "original"])
def test_the_saved_input_knows_its_valid_rows(original: bool) -> None:
    seen = []

    class Listener:
        def pack(self, tensor: Tensor, rows: Tensor | None) -> None:
            seen.append((tuple(tensor.shape), None if rows is None else rows.item()))

        def unpack(self, handle: Any) -> Tensor:
            raise AssertionError

    module = build(save_original_input=original)
    x = torch.randn(40, H, requires_grad=True)
    with saving(Listener()):
        module(x, [5, 0, 31, 1])
    assert ((40, H), 37) in seen
    assert valid_rows(torch.randn(2)) is None


@pytest.mark.parametrize("original", [False, True], ids=["columns", "original"])
def test_rows_that_do_not_lie_one_after_another_work(original: bool) -> None:
    module, counts = build(save_original_input=original), [5, 0, 31, 1]
    x, dy = torch.randn(H, 40), torch.randn(N, 40)
    expected = step(copy.deepcopy(module), x.t().contiguous(), counts, dy.t().contiguous(), "mxfp8")
    y = x.t().requires_grad_()
    with autocast(recipe="mxfp8"), saving(Meter()):
        out = module(y, counts)
    out.backward(dy.t())
    assert torch.equal(out, expected[0])
    assert torch.equal(y.grad, expected[1])  # pyright: ignore
    assert torch.equal(module.weight.grad, expected[2])  # pyright: ignore


def test_leading_dimensions_are_rows_like_any_others() -> None:
    module, counts = build(), [5, 0, 31, 1]
    x, dy = torch.randn(40, H), torch.randn(40, N)
    expected = step(copy.deepcopy(module), x, counts, dy, "mxfp8")
    found = step(module, x.view(4, 10, H), counts, dy.view(4, 10, N), "mxfp8")
    assert all(torch.equal(a.view_as(b), b) for a, b in zip(found, expected, strict=True))


def test_a_frozen_weight_keeps_no_input_and_a_frozen_input_gets_no_gradient() -> None:
    module, counts = build(bias=False), [5, 0, 31, 1]
    x, dy = torch.randn(37, H), torch.randn(37, N) / 8
    _, dx, dw = step(copy.deepcopy(module), x, counts, dy, "high_precision")
    module(x, counts).backward(dy)
    assert torch.equal(module.weight.grad, dw)  # pyright: ignore
    module.weight.requires_grad_(False)
    meter = Meter()
    x.requires_grad_()
    with saving(meter):
        y = module(x, counts)
    y.backward(dy)
    assert meter.bytes == 4 * G
    assert torch.equal(x.grad, dx)  # pyright: ignore


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_saved(mode: Any) -> None:
    module, x, meter = build(), torch.randn(40, H), Meter()
    expected = module(x, [5, 0, 31, 1])
    with saving(meter), mode():
        y = module(x, [5, 0, 31, 1])
    assert torch.equal(y, expected)
    assert meter.calls == 0


@pytest.mark.parametrize("layout", [(40, N), (N, 40)], ids=["rows", "columns"])
def test_the_callers_buffer_is_written_and_otherwise_left_as_it_was(layout: Any) -> None:
    module, counts, x = build(), [5, 0, 31, 1], torch.randn(40, H)
    buffer = torch.empty(layout)
    out = buffer if layout[0] == 40 else buffer.t()
    address, strides = out.data_ptr(), out.stride()
    for _ in range(2):
        y = module(x, counts, out)
        assert torch.equal(y, module(x, counts))
        assert y.requires_grad
        assert torch.equal(out, y)
        assert y.data_ptr() == out.data_ptr() == address
        assert (out.requires_grad, out.grad_fn, out.stride()) == (False, None, strides)
        module.zero_grad()
        expected = step(copy.deepcopy(module), x, counts, torch.ones(40, N), "high_precision")
        y.backward(torch.ones(40, N))
        assert torch.equal(module.weight.grad, expected[2])  # pyright: ignore


def test_a_buffer_that_does_not_fit_is_refused() -> None:
    module, x = build(), torch.randn(4, H)
    for out, error in (
        (3, DtypeError),
        (torch.empty(3, N), ShapeError),
        (torch.empty(4, N, dtype=torch.bfloat16), DtypeError),
        (torch.empty(4, N, device="meta"), DeviceError),
        (torch.empty(4, N, requires_grad=True), ConfigError),
    ):
        with pytest.raises(error, match="out "):
            module(x, [1, 1, 1, 1], out)


def test_the_original_input_is_refused_where_the_scale_is_learnt() -> None:
    with autocast(recipe="float8_delayed"), pytest.raises(RecipeError, match="save_original"):
        build(save_original_input=True)(torch.randn(4, H), [1, 1, 1, 1])


def test_no_group_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_gemms must be a whole number of at least 1, got 0"):
        GroupedLinear(0, H, N)


def test_it_prints_its_sizes() -> None:
    assert "num_gemms=4, in_features=20, out_features=14, bias=True" in repr(build())
