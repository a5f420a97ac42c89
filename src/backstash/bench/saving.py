"""What it costs to save: ``prepare_for_saving`` and ``restore_from_saved`` against a loop.

The yardstick is the loop that libraries with quantized tensors use.  For every value it
asks ``isinstance`` and appends to two lists; on restore it takes the first of the saved
tensors and slices it off, which copies the rest and so grows with the square of the count.
A quantized value is asked to hand out its buffers, and later to take them back; in between
it is empty, so this loop cannot be used twice on one value as ours can.

Both are on the path of every module, once in forward and once in backward.

One row has another yardstick.  Saving tells distributed weights from plain ones, which must cost
the plain ones nothing, so it is timed against itself with no notion of distributed weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from backstash.bench.record import Row
from backstash.bench.timing import time_pair
from backstash.formats import MXFP8, Usage
from backstash.saving import prepare_for_saving, records, restore_from_saved, slots

EXPERTS = 32


def measure(repeats: int) -> list[Row]:
    """Time every set of values, after both ways were seen to give them back."""
    rows = []
    for what, values, target in value_sets():
        theirs = [Emptied(value) if _is_quantized(value) else value for value in values]
        check_outputs(values, theirs)
        pair = time_pair(_round_trip_ours(values), _round_trip_loop(theirs), repeats)
        rows.append(Row(case="saving", what=what, values=len(values), target=target, pair=pair))
    return [*rows, measure_question(repeats)]


def measure_question(repeats: int) -> Row:
    """Time saving the values of plain weights against the same code that knows of no others."""
    values = grouped_values(torch.nn.Parameter)
    unasked = _round_trip(without_question(), values)
    check_same(values, unasked())
    return Row(
        case="saving",
        what="the same, plain, against code that knows of no others",
        values=len(values),
        target=1.02,
        pair=time_pair(_round_trip_ours(values), unasked, repeats),
    )


def without_question() -> Callable[..., Any]:
    """``prepare_for_saving`` with a layout for which only a ``Parameter`` is a weight."""

    def is_parameter(kind: type) -> bool:
        return kind is torch.nn.Parameter

    known = vars(slots) | {"_is_kept_whole": is_parameter}
    layout_of = functools.lru_cache(FunctionType(slots.layout_of.__wrapped__.__code__, known))
    unaware = vars(records) | {"layout_of": layout_of}
    return FunctionType(prepare_for_saving.__code__, unaware)


class Shard(torch.nn.Parameter):
    """A distributed weight of another library; to be saved it is asked for its marker alone."""

    is_distributed_weight = True


def grouped_values(weight: Callable[[Tensor], Tensor]) -> list[Any]:
    """What a grouped linear layer saves: its rows, a weight an expert, and where groups end."""
    weights = [weight(torch.randn(4, 4)) for _ in range(EXPERTS)]
    return [torch.randn(64, 4), *weights, torch.arange(EXPERTS, dtype=torch.int32)]


def value_sets() -> list[tuple[str, list[Any], float | None]]:
    """What is saved, the values, and the ratio that is wanted (None: nothing is promised)."""

    def plain(count: int) -> list[Any]:
        return [torch.randn(4, 4) for _ in range(count)]

    def parameters(count: int) -> list[Any]:
        return [torch.nn.Parameter(torch.randn(4, 4)) for _ in range(count)]

    quantized = [MXFP8.quantize(torch.randn(64, 64), usage=Usage.BOTH) for _ in range(8)]
    return [
        ("64 plain tensors", plain(64), 1 / 3),
        ("32 parameters + 32 tensors", parameters(32) + plain(32), 1.0),
        ("96 tensors + 32 None", plain(96) + [None] * 32, 1 / 3),
        ("8 MXFP8 tensors", quantized, None),
        ("128 plain tensors", plain(128), 1 / 3),
        ("256 plain tensors", plain(256), 1 / 3),
        ("grouped linear, 32 plain weights", grouped_values(torch.nn.Parameter), None),
        ("the same, 32 distributed weights", grouped_values(Shard), None),
    ]


def show(rows: list[Row]) -> None:
    """Print the table, the ratio first."""
    table = Table(title="prepare_for_saving + restore_from_saved, against a loop over the values")
    for header in ("ratio", "quartiles", "wanted", "ours µs", "loop µs", "ns/value"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("values")
    for row in rows:
        pair = row.pair
        table.add_row(
            f"[bold]{pair.ratio:.2f}[/bold]",
            f"{pair.ratio_low:.2f}-{pair.ratio_high:.2f}",
            "" if row.target is None else f"≤ {row.target:.2f}",
            f"{pair.ours_us:.1f}",
            f"{pair.theirs_us:.1f}",
            f"{pair.ours_us / row.values * 1000:.0f}",
            row.what,
        )
    Console().print(table)


def check_outputs(values: Sequence[Any], theirs: Sequence[Any]) -> None:
    """Refuse to time two ways that do not give the same values back.

    Raises:
        RuntimeError: They do not; a timing would mean nothing.
    """
    check_same(values, _round_trip_ours(values)())
    check_same(values, _round_trip_loop(theirs)())


def check_same(values: Sequence[Any], restored: Sequence[Any]) -> None:
    """Refuse to time what does not give the values back.

    Raises:
        RuntimeError: It does not.
    """
    for i, (value, came) in enumerate(zip(values, restored, strict=True)):
        if not _same(value, came):
            raise RuntimeError(f"value {i} did not come back as it was saved; nothing is timed")


class Emptied:
    """A quantized value of the yardstick: hands its buffers out and takes them back."""

    __slots__ = ("buffers",)

    def __init__(self, value: Any) -> None:
        self.buffers: list[Tensor] = _buffers(value)

    def prepare(self) -> tuple[list[Tensor], Emptied]:
        buffers, self.buffers = self.buffers, []
        return buffers, self

    def restore(self, saved: Sequence[Any], count: int) -> Sequence[Any]:
        """Take ``count`` buffers from the front; returns what is left."""
        self.buffers = list(saved[:count])
        return saved[count:]


def loop_prepare(*values: Any) -> tuple[list[Any], list[Any]]:
    """Take the values apart, one at a time."""
    tensors: list[Any] = []
    objects: list[Any] = []
    for value in values:
        if value is None or isinstance(value, Tensor):
            tensors.append(value)
            objects.append(None)
        else:
            buffers, emptied = value.prepare()
            tensors.extend(buffers)
            objects.append((emptied, len(buffers)))
    return tensors, objects


def loop_restore(objects: Sequence[Any], saved: Sequence[Any]) -> list[Any]:
    """Put the values together again, slicing the front off what was saved."""
    values: list[Any] = []
    for item in objects:
        if item is None:
            values.append(saved[0])
            saved = saved[1:]
        else:
            emptied, count = item
            saved = emptied.restore(saved, count)
            values.append(emptied)
    return values


def _round_trip_ours(values: Sequence[Any]) -> Callable[[], Sequence[Any]]:
    return _round_trip(prepare_for_saving, values)


def _round_trip(prepare: Callable[..., Any], values: Sequence[Any]) -> Callable[[], Sequence[Any]]:
    def run() -> Sequence[Any]:
        tensors, records = prepare(*values)
        return restore_from_saved(records, tensors)

    return run


def _round_trip_loop(values: Sequence[Any]) -> Callable[[], Sequence[Any]]:
    def run() -> Sequence[Any]:
        tensors, objects = loop_prepare(*values)
        # Autograd gives a tuple back, whatever it was given.
        return loop_restore(objects, tuple(tensors))

    return run


def _is_quantized(value: Any) -> bool:
    return hasattr(value, "__tensor_flatten__")


def _buffers(value: Any) -> list[Tensor]:
    names, _ = value.__tensor_flatten__()
    return [getattr(value, name) for name in names]


def _same(value: Any, restored: Any) -> bool:
    if value is None or not _is_quantized(value):
        return restored is value
    buffers = restored.buffers if isinstance(restored, Emptied) else _buffers(restored)
    return all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in zip(_buffers(value), buffers, strict=True)
    )
