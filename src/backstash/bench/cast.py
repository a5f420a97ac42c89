"""How fast quantizing is beside copying: ``backstash bench cast``, on a GPU.

A cast computes next to nothing, so memory is what it can be limited by.  The yardstick is a
copy from the device to itself that moves as many bytes as the cast does, read and written
together, timed in turns with it, some calls in a row.  What is compared first are the codes and
scales with those of the reference.

Letters: M rows, K columns, G groups of rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from backstash import kernels
from backstash.bench.record import Row
from backstash.bench.timing import Pair, time_gpu_pair
from backstash.device import default_device, device_name
from backstash.errors import DeviceError
from backstash.kernels.reference import cast as reference
from backstash.kernels.reference import float8_block, float8_rowwise, hadamard, nvfp4, transpose

SIZES = ((32768, 2048), (262144, 2048), (262144, 1536), (8192, 7168))
GROUPS = 128
REFERENCES = (reference, float8_block, float8_rowwise, transpose, nvfp4, hadamard)
ONE_USAGE, BOTH_USAGES = 0.85, 0.75
ROW_BYTES = 2 << 30
APART = tuple(k * (37 * 4096 + 512) for k in (1, 3, 8, 21, 55, 144))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CastRow(Row):
    """A row, and what it moved: ``values`` rows of ``columns``.

    ``target`` is the share of a copy's speed that is wanted.
    """

    device: str
    columns: int
    bytes_moved: int

    @property
    def share(self) -> float:
        """The cast's bytes a second over the copy's."""
        return 1 / self.pair.ratio


@dataclasses.dataclass(frozen=True)
class Work:
    """One cast: what it is called with and what it should give."""

    what: str
    target: float
    run: Callable[[], object]
    wanted: Callable[[], object]
    reads: Sequence[Tensor]
    passes: int = 1


def measure(repeats: int) -> list[CastRow]:
    """Compare every cast with its reference, then time it beside a copy.

    Raises:
        DeviceError: There is no GPU.
        RuntimeError: A cast does not give what its reference does; nothing is timed.
    """
    if not torch.cuda.is_available():
        raise DeviceError(
            "bench cast compares GPU kernels with a device copy and found no GPU; run it on one"
        )
    rows = []
    for M, K in SIZES:
        for work in casts(M, K):
            given = flat(work.run())
            check_outputs(work.what, given, flat(work.wanted()))
            moved = sum(x.nbytes for x in work.reads) * work.passes + sum(y.nbytes for y in given)
            source, target = copied(moved)
            pair = time_in_rows(work.run, lambda t=target, s=source: t.copy_(s), moved, repeats)
            rows.append(
                CastRow(
                    case="cast",
                    what=work.what,
                    target=work.target,
                    pair=pair,
                    device=device_name(default_device()),
                    values=M,
                    columns=K,
                    bytes_moved=moved,
                )
            )
    return rows


def casts(M: int, K: int) -> Iterator[Work]:
    """Every cast that is timed, for bfloat16 values in one matrix and in groups."""
    x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
    share_G = torch.distributions.Dirichlet(torch.full((GROUPS,), 0.3)).sample()
    ends = (share_G.cumsum(0) * M).round().int().clamp(max=M).cuda()
    ends[-1] = M
    e4m3, scale = torch.float8_e4m3fn, torch.full((1,), 3.7, device="cuda")
    scales = torch.rand(GROUPS, device="cuda") + 0.5

    def current(kernel) -> Tensor:
        return kernel.quantize_scaled(
            x, kernel.scale_from_amax(kernel.amax(x), largest=448.0), e4m3
        )

    yield Work("float8, scale given", ONE_USAGE, *both("quantize_scaled", x, scale, e4m3), [x])
    yield Work(
        "float8, current scale", ONE_USAGE, lambda: current(kernels), lambda: current(reference),
        [x], 2,
    )  # fmt: skip
    grouped = both("quantize_scaled", x, scales, e4m3, ends)
    yield Work("float8, groups", ONE_USAGE, *grouped, [x])
    yield Work("largest of groups", ONE_USAGE, *both("group_amax", x, ends), [x])
    rows = both("quantize_float8_rows", x, e4m3)
    yield Work("float8 by rows", ONE_USAGE, *rows, [x])
    columns = both("quantize_float8_columns", x, e4m3, ends)
    yield Work("float8 by columns, groups", ONE_USAGE, *columns, [x], 2)
    yield Work("blocks of 128, rows", ONE_USAGE, *both("quantize_block_rows", x, e4m3), [x])
    columns = both("quantize_block_columns", x, e4m3, ends)
    yield Work("blocks of 128, columns, groups", ONE_USAGE, *columns, [x])
    pair = both("quantize_block_both", x, e4m3, ends)
    yield Work("blocks of 128, both, groups", BOTH_USAGES, *pair, [x])
    tiles = both("quantize_block_tiles", x, e4m3)
    yield Work("blocks of 128, tiles", ONE_USAGE, *tiles, [x])
    yield Work("mxfp8 rows", ONE_USAGE, *both("quantize_mx_rows", x), [x])
    yield Work("mxfp8 columns, groups", ONE_USAGE, *both("quantize_mx_columns", x, ends), [x])
    yield Work("mxfp8 both, groups", BOTH_USAGES, *both("quantize_mx_both", x, ends), [x])
    yield from readings(x, ends)
    yield from nvfp4_casts(x, ends)


def readings(x: Tensor, ends: Tensor) -> Iterator[Work]:
    """What is done with codes: back to values, and turned the other way round."""
    rows, columns = kernels.quantize_mx_both(x, ends)
    back = both("dequantize_mx_rows", *rows, x.dtype)
    yield Work("values of mxfp8 rows", ONE_USAGE, *back, rows)
    back = both("dequantize_mx_columns", *columns, x.dtype, ends)
    yield Work("values of mxfp8 columns, groups", ONE_USAGE, *back, columns)
    yield Work("codes transposed", ONE_USAGE, *both("transpose_codes", rows[0]), rows[:1])
    e4m3 = torch.float8_e4m3fn
    rows, columns = kernels.quantize_block_both(x, e4m3, ends)
    back = both("dequantize_block_rows", *rows, e4m3, x.dtype)
    yield Work("values of blocks of 128, rows", ONE_USAGE, *back, rows)
    back = both("dequantize_block_columns", *columns, e4m3, x.dtype, ends)
    yield Work("values of blocks of 128, columns, groups", ONE_USAGE, *back, columns)
    pair = kernels.quantize_float8_columns(x, e4m3, ends)
    back = both("dequantize_float8_columns", *pair, e4m3, x.dtype, ends)
    yield Work("values of float8 by columns, groups", ONE_USAGE, *back, pair)


def nvfp4_casts(x: Tensor, ends: Tensor) -> Iterator[Work]:
    """Casts to four bits and back, whose largest magnitude over the blocks is given."""
    one, amax_G = kernels.amax(x), kernels.group_amax(x, ends)
    rotation, seed = kernels.hadamard_matrix(x.device), kernels.draw_seed(x.device)
    rotated = both("rotated_column_amax", x, rotation, ends)
    yield Work("largest of rotated columns, groups", ONE_USAGE, *rotated, [x])
    rotated_GK = kernels.rotated_column_amax(x, rotation, ends)
    whole = ends // kernels.NVFP4_BLOCK * kernels.NVFP4_BLOCK
    whole[-1] = len(x)
    for what, *arguments in (
        ("rows", x, one),
        ("rows, groups", x, amax_G, ends),
        ("rows, random", x, one, None, seed),
        ("tiles", x, one),
        ("columns", x, one),
        ("columns, groups", x, amax_G, ends),
        ("columns, groups of whole blocks", x, amax_G, whole),
        ("columns, rotated, groups", x, rotated_GK, ends, rotation),
    ):
        cast = both(f"quantize_nvfp4_{what.split(',')[0]}", *arguments)
        yield Work(f"nvfp4 {what}", ONE_USAGE, *cast, [x])
    cast = both("quantize_nvfp4_both", x, (amax_G, amax_G), ends)
    yield Work("nvfp4 both, groups", BOTH_USAGES, *cast, [x])
    rows = kernels.quantize_nvfp4_rows(x, one)
    back = both("dequantize_nvfp4_rows", *rows, one, x.shape[1], x.dtype)
    yield Work("values of nvfp4 rows", ONE_USAGE, *back, rows)
    columns = kernels.quantize_nvfp4_columns(x, amax_G, ends)
    back = both("dequantize_nvfp4_columns", *columns, amax_G, len(x), x.dtype, ends)
    yield Work("values of nvfp4 columns, groups", ONE_USAGE, *back, columns)


def both(name: str, *arguments) -> tuple[Callable[[], object], Callable[[], object]]:
    """A call of a kernel, and the same call of its reference."""
    ours = getattr(kernels, name)
    theirs = next(getattr(file, name) for file in REFERENCES if hasattr(file, name))
    return lambda: ours(*arguments), lambda: theirs(*arguments)


def time_in_rows(
    ours: Callable[[], object], theirs: Callable[[], object], moved: int, repeats: int
) -> Pair:
    """Time one call of each, of as many in a row as move ``ROW_BYTES``, 16 at most.

    What a call has written is in the cache when it ends, and what comes next waits until that
    is in memory.  In a row each call pays for itself; in turns, one that only reads would pay
    for the copy before it, and the copy for nothing.
    """
    calls = max(1, min(16, ROW_BYTES // moved))

    def in_a_row(function: Callable[[], object]) -> Callable[[], object]:
        return lambda: [function() for _ in range(calls)]

    pair = time_gpu_pair(in_a_row(ours), in_a_row(theirs), repeats)
    return dataclasses.replace(pair, ours_us=pair.ours_us / calls, theirs_us=pair.theirs_us / calls)


def copied(moved: int) -> tuple[Tensor, Tensor]:
    """Two buffers between which a copy moves ``moved`` bytes, at its full speed.

    The bytes are whole blocks of 512.  At some distances between the two buffers each read
    waits for a write to the same part of the memory, and a copy is a third slower: of some
    distances the one with the fastest copy is taken, so that no cast looks fast beside it.
    """
    half = moved // 1024 * 512
    room = torch.randint(0, 255, (2 * half + max(APART),), dtype=torch.uint8, device="cuda")
    pairs = [(room[:half], room[half + apart : 2 * half + apart]) for apart in APART]
    return min(pairs, key=lambda pair: copy_ms(*pair))


def copy_ms(source: Tensor, target: Tensor) -> float:
    """The fastest of three copies."""
    times = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)


def flat(outputs: Any) -> list[Tensor]:
    """The tensors of nested tuples."""
    if isinstance(outputs, Tensor):
        return [outputs]
    return [tensor for part in outputs for tensor in flat(part)]


def check_outputs(what: str, given: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Refuse to time a cast that gives something else than its reference.

    Raises:
        RuntimeError: It does.
    """
    for one, other in zip(given, wanted, strict=True):
        if not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
            raise RuntimeError(f"{what}: outputs differ from the reference's; nothing is timed")


def show(rows: Sequence[CastRow]) -> None:
    """Print the table, the share of a copy's speed first."""
    table = Table(title="casts, against a device copy of as many bytes")
    for header in (
        "of a copy",
        "quartiles",
        "wanted",
        "GB/s",
        "copy GB/s",
        "µs",
        "rows",
        "columns",
    ):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("cast")
    for row in rows:
        pair = row.pair
        table.add_row(
            f"[bold]{row.share:.2f}[/bold]",
            f"{1 / pair.ratio_high:.2f}-{1 / pair.ratio_low:.2f}",
            f"≥ {row.target:.2f}",
            f"{row.bytes_moved / pair.ours_us / 1000:.0f}",
            f"{row.bytes_moved / pair.theirs_us / 1000:.0f}",
            f"{pair.ours_us:.0f}",
            str(row.values),
            str(row.columns),
            row.what,
        )
    Console(width=140).print(table)
