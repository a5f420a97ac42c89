"""A call reads and keeps its operands exactly as the recipe's formats say."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import backstash as bs
from backstash.nn.call import Call
from backstash.nn.gathered import Gathered
from backstash.nn.operands import Columns
from backstash.recipes import DelayedScaling, Gradient, Operand, Phase, Role, Step
from backstash.tensors import QuantizedTensor
from format_cases import FORMATS, name_of

#: Recipes whose values are the same each time; stochastic rounding is tested with its format.
NAMES = ("high_precision", "float8_current", "float8_delayed", "mxfp8")
LOW = [name for name in NAMES if name != "high_precision"]
SIZES = {"awkward": (37, 20), "one_row": (1, 33), "one_column": (40, 1), "no_rows": (0, 8)}
COUNTS = [5, 0, 31, 1]

each_recipe = pytest.mark.parametrize("name", NAMES)
each_low = pytest.mark.parametrize("name", LOW)
each_size = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)


def call_of(name: str, groups: int = 1, **options: Any) -> Call:
    """A call as a module makes it, with scales of two for delayed scaling."""
    recipe = bs.recipe(name, **options)
    call = Call(recipe, "Linear", "layers.0")
    if name != "float8_delayed":
        return call
    scalings = {
        operand: DelayedScaling(getattr(recipe, operand.value), groups, torch.device("cpu"))
        for operand in (Operand.INPUT, Operand.WEIGHT, Operand.GRADIENT)
    }
    for scaling in scalings.values():
        scaling.scale_G = torch.full((groups,), 2.0)
    step = Step()
    gradient = step.expect_backward(scalings.pop(Operand.GRADIENT))
    scales = {operand: scaling.scale_G for operand, scaling in scalings.items()}
    return dataclasses.replace(call, scalings=scalings, scales=scales, step=step, gradient=gradient)


def quantized(call: Call, operand: Operand, x: Tensor, usage: bs.Usage) -> Tensor:
    """What the format itself gives for the operand."""
    format = getattr(call.recipe, operand.value)
    if format is bs.HIGH_PRECISION:
        return x
    scale = torch.full((1,), 2.0) if format.stateful else None
    return format.quantize(x, usage=usage, scale=scale).dequantize(usage)


def values(operand: Tensor | Columns | Gathered) -> Tensor:
    """What the matmul reads: the operand is quantized along one direction, or plain."""
    if isinstance(operand, Gathered):
        operand = operand.matrix()
    if isinstance(operand, Columns):
        operand = operand.quantized()
    return operand.dequantize() if isinstance(operand, QuantizedTensor) else operand


def same(one: Tensor | Columns | Gathered, other: Tensor | Columns | Gathered) -> bool:
    """Bit-equal values; two quantized operands must have the same codes."""
    if isinstance(one, QuantizedTensor) and isinstance(other, QuantizedTensor):
        return torch.equal(one, other)
    return torch.equal(values(one), values(other))


def x_of(size: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size).to(dtype)


@each_recipe
@each_size
@pytest.mark.parametrize("operand", [Operand.INPUT, Operand.WEIGHT, Operand.GRADIENT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_and_columns_are_the_values_of_the_format(
    name: str, size: tuple[int, int], operand: Operand, dtype: torch.dtype
) -> None:
    call, x = call_of(name), x_of(size, dtype)
    rows, columns = call.rows(operand, x), call.columns(operand, x)
    assert torch.equal(values(rows), quantized(call, operand, x, bs.Usage.ROWWISE))
    assert torch.equal(values(columns), quantized(call, operand, x, bs.Usage.COLUMNWISE))
    assert values(rows).dtype == values(columns).dtype == dtype


@each_low
def test_an_operand_can_be_read_along_its_own_direction_only(name: str) -> None:
    call, x = call_of(name), x_of((37, 20))
    rows, kept = call.input_pair(x, keep=True)
    assert kept is not None
    for operand, usage in (
        (rows, bs.Usage.ROWWISE),
        (call.rows(Operand.WEIGHT, x), bs.Usage.ROWWISE),
        (call.kept_operand(kept), bs.Usage.COLUMNWISE),
        (call.columns(Operand.WEIGHT, x), bs.Usage.COLUMNWISE),
        *zip(call.gradient_pair(x), bs.Usage, strict=True),
    ):
        assert isinstance(operand, QuantizedTensor)
        assert operand.usage is usage


@each_recipe
@each_size
def test_a_pair_is_bit_equal_to_its_two_readings(name: str, size: tuple[int, int]) -> None:
    call, x = call_of(name), x_of(size)
    rows, kept = call.input_pair(x, keep=True)
    assert kept is not None
    assert same(rows, call.rows(Operand.INPUT, x))
    assert same(call.kept_operand(kept), call.columns(Operand.INPUT, x))
    assert same(call.kept_operand(kept), call.kept_operand(call.keep_columns(Operand.INPUT, x)))
    dy_rows, dy_columns = call.gradient_pair(x)
    assert same(dy_rows, call.rows(Operand.GRADIENT, x))
    assert same(dy_columns, call.columns(Operand.GRADIENT, x))


@each_recipe
def test_what_is_not_asked_for_is_not_kept(name: str) -> None:
    call, x = call_of(name), x_of((37, 20))
    rows, kept = call.input_pair(x, keep=False)
    assert kept is None
    assert same(rows, call.rows(Operand.INPUT, x))


@each_low
@each_size
def test_what_is_kept_has_the_bytes_of_one_direction(name: str, size: tuple[int, int]) -> None:
    call, x = call_of(name), x_of(size)
    _, kept = call.input_pair(x, keep=True)
    assert isinstance(kept, QuantizedTensor)
    assert kept.usage is bs.Usage.COLUMNWISE
    wanted = call.recipe.input.saved_bytes(*size, x.dtype, bs.Usage.COLUMNWISE)
    assert kept.nbytes == wanted
    assert sum(buffer.untyped_storage().nbytes() for buffer in kept.buffers.values()) == wanted


def test_high_precision_reads_and_keeps_the_tensor_itself() -> None:
    call, x = call_of("high_precision"), x_of((37, 20))
    rows, kept = call.input_pair(x, keep=True)
    everything = [rows, kept, *call.gradient_pair(x), call.rows(Operand.WEIGHT, x)]
    everything += [call.columns(Operand.WEIGHT, x), call.keep_preactivation(x)]
    assert all(value is x for value in everything)


@each_recipe
@pytest.mark.parametrize("capacity", [37, 45], ids=["full", "with_a_tail"])
def test_groups_are_read_each_on_its_own(name: str, capacity: int) -> None:
    call, x = call_of(name, len(COUNTS)), x_of((capacity, 20))
    grouped = bs.GroupedTensor.from_counts(x, COUNTS)
    ends_G = grouped.ends_G
    rows, kept = call.input_pair(x, ends_G, keep=True)
    columns = values(call.columns(Operand.INPUT, x, ends_G))
    assert isinstance(kept, bs.GroupedTensor)
    assert kept.ends_G is ends_G
    alone = call_of(name)
    for g, group in enumerate(x[: sum(COUNTS)].split(COUNTS)):
        end = int(ends_G[g])
        mine = slice(end - COUNTS[g], end)
        assert torch.equal(values(rows)[mine], values(alone.rows(Operand.INPUT, group)))
        assert torch.equal(columns[mine], values(alone.columns(Operand.INPUT, group)))
        assert torch.equal(call.kept_values(kept)[mine], columns[mine])


@pytest.mark.parametrize("format", [f for f in FORMATS if not f.stateful], ids=name_of)
def test_rows_are_gathered_after_they_are_quantized_or_before_with_the_same_codes(
    format: bs.Format,
) -> None:
    call, x = Call(bs.custom(lambda role: format), "GroupedMLP", ""), x_of((9, 40))
    source_R = torch.tensor([3, 3, 0, 8, 1, 3, 7, 2, 5, 4, 6])
    ends_G = torch.tensor([2, 2, 10], dtype=torch.int32)
    found = call.gathered_rows(Operand.INPUT, x, source_R, ends_G)
    wanted = call.rows(Operand.INPUT, x[source_R], ends_G)
    assert found.shape == wanted.shape
    assert torch.equal(values(found)[:10], values(wanted)[:10])
    lone = format.along(bs.Usage.ROWWISE).has_lone_rows
    alone = [format.quantize(x[row : row + 1]).dequantize() for row in source_R]
    assert not lone or torch.equal(values(found), torch.cat(alone))


@each_recipe
def test_rows_past_the_end_change_nothing(name: str) -> None:
    x = x_of((45, 20))
    ends_G = bs.GroupedTensor.from_counts(x, COUNTS).ends_G
    poisoned = x.clone()
    poisoned[sum(COUNTS) :] = float("nan")
    results = []
    for tensor in (x, poisoned):
        call = call_of(name, len(COUNTS))
        rows, kept = call.input_pair(tensor, ends_G, keep=True)
        assert kept is not None
        pair = call.gradient_pair(tensor, ends_G)
        read = (rows, call.kept_operand(kept), *pair)
        results.append([values(operand)[: sum(COUNTS)] for operand in read])
    assert all(map(torch.equal, *results))


@each_low
@pytest.mark.parametrize("kept_as", LOW[::2])
def test_a_preactivation_is_kept_in_its_own_format(name: str, kept_as: str) -> None:
    format = bs.recipe(kept_as).input
    call, h = call_of(name, preactivation=format), x_of((37, 20))
    kept = call.keep_preactivation(h)
    assert isinstance(kept, QuantizedTensor)
    assert kept.format == format
    assert torch.equal(call.kept_values(kept), format.quantize(h).dequantize())
    assert call_of(name).keep_preactivation(h) is h


@each_low
@pytest.mark.parametrize("operand", [Operand.INPUT, Operand.WEIGHT])
def test_a_tensor_that_is_quantized_already_is_read_as_it_is(name: str, operand: Operand) -> None:
    q = bs.MXFP8.quantize(x_of((37, 20)), usage=bs.Usage.BOTH)
    for call in (call_of(name), call_of("high_precision")):
        assert same(call.rows(operand, q), q.only(bs.Usage.ROWWISE))
        assert same(call.columns(operand, q), q.only(bs.Usage.COLUMNWISE))


def test_formats_that_differ_by_phase_are_each_used_in_theirs() -> None:
    def choose(role: Role) -> bs.Format:
        return bs.MXFP8 if role.phase is Phase.FORWARD else bs.FLOAT8_CURRENT

    call, x = Call(bs.custom(choose), "Linear", ""), x_of((37, 20))
    rows, kept = call.input_pair(x, keep=True)
    assert same(rows, bs.MXFP8.quantize(x))
    assert isinstance(kept, QuantizedTensor)
    assert kept.format == bs.FLOAT8_CURRENT
    columns = bs.FLOAT8_CURRENT.quantize(x, usage=bs.Usage.COLUMNWISE)
    assert torch.equal(call.kept_values(kept), columns.dequantize())


def test_the_recipe_is_asked_with_the_role() -> None:
    asked: list[Role] = []

    def choose(role: Role) -> bs.Format:
        asked.append(role)
        return bs.MXFP8

    call, x = Call(bs.custom(choose), "GroupedMLP", "layers.0.fc1"), x_of((37, 20))
    call.rows(Operand.WEIGHT, x)
    call.gradient_pair(x)
    call.keep_preactivation(x)
    assert asked == [
        Role(Operand.WEIGHT, Phase.FORWARD, "GroupedMLP", "layers.0.fc1"),
        Role(Operand.GRADIENT, Phase.BACKWARD, "GroupedMLP", "layers.0.fc1"),
        Role(Operand.PREACTIVATION, Phase.BACKWARD, "GroupedMLP", "layers.0.fc1"),
    ]


def test_delayed_scaling_quantizes_with_the_scale_that_forward_found() -> None:
    call, x = call_of("float8_delayed"), x_of((37, 20))
    before = call.columns(Operand.WEIGHT, x)
    call.scalings[Operand.WEIGHT].update(torch.tensor([1000.0]))
    assert same(call.columns(Operand.WEIGHT, x), before)


def test_delayed_scaling_quantizes_a_gradient_always_as_the_first_time() -> None:
    call, x = call_of("float8_delayed"), x_of((37, 20))
    assert call.gradient is not None
    call.gradient.scaling.update(torch.tensor([1000.0]))
    first = call.rows(Operand.GRADIENT, x)
    call.gradient.scaling.update(torch.tensor([1e-3]))
    assert same(call.rows(Operand.GRADIENT, x), first)


def test_delayed_scaling_notes_the_largest_magnitude_of_each_group() -> None:
    call, x = call_of("float8_delayed", len(COUNTS)), x_of((45, 20))
    x[sum(COUNTS) :] = 1e9
    ends_G = bs.GroupedTensor.from_counts(x, COUNTS).ends_G
    call.input_pair(x, ends_G, keep=True)
    assert call.step is not None
    call.step.leave(learns=True)
    groups = x[: sum(COUNTS)].split(COUNTS)
    wanted = [group.abs().max().item() if len(group) else 0.0 for group in groups]
    assert call.scalings[Operand.INPUT].history_LG[-1].tolist() == wanted


def test_a_call_without_a_step_notes_nothing() -> None:
    call, x = call_of("float8_delayed"), x_of((37, 20))
    assert call.gradient is not None
    step, scaling = call.step, call.gradient.scaling
    quiet = dataclasses.replace(call, step=None, gradient=Gradient(None, scaling))
    quiet.input_pair(x, keep=True)
    quiet.gradient_pair(x)
    assert step is not None
    step.leave(learns=True)
    for each in (scaling, call.scalings[Operand.INPUT]):
        assert not each.history_LG.any()


def test_a_call_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        call_of("mxfp8").recipe = bs.recipe("mxfp8")  # pyright: ignore
