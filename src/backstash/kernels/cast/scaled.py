"""Codes that share a float32 scale: per tensor, group, row or column.

The hardware's cast is the definition's: it rounds to nearest even, a value past the largest
code becomes the largest code, and every NaN becomes 0x7F.

A program owns B rows of some columns, whatever groups they belong to: it reads them once, and
then goes over their groups, mostly one, for a maximum, or finds the scale of each row.

Letters: M rows, K columns, G groups, B rows of a program.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.blocks import (
    group_number,
    groups_between,
    new_bytes,
    rows_between,
    unit_columns,
)
from backstash.kernels.cast.pairs import are_words, larger_pair, magnitudes
from backstash.kernels.cast.scales import Scaling, scale_of
from backstash.kernels.launches import Launcher
from backstash.kernels.reference.cast import FLOAT32_MAX
from backstash.kernels.reference.into import Into, noop_of
from backstash.kernels.sizes import ceil_div, next_power_of_2

# Values of a program that multiplies, and the most of its rows and columns.
_VALUES, _ROWS, _COLUMNS = 4096, 64, 512
# Groups that its rows are compared with at once.
_GROUPS = 128
# A program that only reads is fastest where it reads far along a row: of 16-bit values, in
# words of two, and of others. One that keeps columns apart has many rows, or few where groups
# are small.
_AMAX_WORDS: dict[str, Any] = {"B": 16, "BK": 512, "num_warps": 8}
_AMAX_VALUES: dict[str, Any] = {"B": 8, "BK": 1024, "num_warps": 4}
_LARGE_STRIP: dict[str, Any] = {"B": 128, "BK": 64, "num_warps": 4}
_SMALL_STRIP: dict[str, Any] = {"B": 64, "BK": 64, "num_warps": 2}
_ROWS_OF_A_LARGE_GROUP = 512
# The last values that a first pass reads stay in the cache for the second one, which begins with
# them, if the others leave it first.
_CACHED_BYTES = 32 << 20


@triton.jit
def _amax_kernel(
    p_x,
    p_amax,
    p_ends,
    p_noop,
    groups,
    rows,
    columns,
    row_stride,
    B: tl.constexpr,
    BK: tl.constexpr,
    BG: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The largest magnitude of each group: a program reads a tile, then finds out whose it is.

    With PAIRS, columns are words of two values.
    """
    if p_noop is not None and tl.load(p_noop) != 0:
        return
    chunks = tl.cdiv(columns, BK)
    first = (tl.program_id(0) // chunks) * B
    i_column = tl.program_id(0) % chunks * BK + tl.arange(0, BK)
    end = rows if p_ends is None else tl.minimum(tl.load(p_ends + groups - 1), rows)
    # The tail is not read.
    if first < end:
        i_row = first + tl.arange(0, B)
        p_tile = p_x + (i_row.to(tl.int64) * row_stride)[:, None] + i_column[None, :]
        mask = (i_row < end)[:, None] & (i_column < columns)[None, :]
        x = tl.load(p_tile, mask=mask, other=0)
        if PAIRS:
            low, high = magnitudes(tl.reduce(x, 1, larger_pair))
            magnitude = tl.maximum(low, high)
        else:
            magnitude = tl.max(tl.abs(x.to(tl.float32)), 1)
        # The maximum with a NaN is the other operand: a NaN does not count.
        # Bits of floats that are not negative are ordered as the floats are.
        bits = tl.cast(tl.maximum(magnitude, 0.0), tl.int32, bitcast=True)
        begin, past = groups_between(p_ends, groups, rows, first, B, BG)
        for group in range(begin, past):  # pyright: ignore[reportArgumentType]
            start, stop = rows_between(p_ends, group, rows, first, B)
            is_member = (i_row >= start) & (i_row < stop)
            tl.atomic_max(p_amax + group, tl.max(tl.where(is_member, bits, 0)), sem="relaxed")


@triton.jit(do_not_specialize=["cached_from"])
def _column_amax_kernel(
    p_x,
    p_amax,
    p_ends,
    p_noop,
    groups,
    rows,
    columns,
    row_stride,
    cached_from,
    B: tl.constexpr,
    BK: tl.constexpr,
    BG: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The largest magnitude of each column of each group, found in the same way."""
    if p_noop is not None and tl.load(p_noop) != 0:
        return
    PARTS: tl.constexpr = 2 if PAIRS else 1  # pyright: ignore[reportAssignmentType]
    chunks = tl.cdiv(columns, BK)
    first = (tl.program_id(0) // chunks) * B
    i_chunk = tl.program_id(0) % chunks
    i_column = i_chunk * BK + tl.arange(0, BK)
    end = rows if p_ends is None else tl.minimum(tl.load(p_ends + groups - 1), rows)
    if first < end:
        i_row = first + tl.arange(0, B)
        p_tile = p_x + (i_row.to(tl.int64) * row_stride)[:, None] + i_column[None, :]
        mask = (i_row < end)[:, None] & (i_column < columns)[None, :]
        if first < cached_from:
            x = tl.load(p_tile, mask=mask, other=0, eviction_policy="evict_first")
        else:
            x = tl.load(p_tile, mask=mask, other=0)
        i_value = i_chunk * (BK * PARTS) + tl.arange(0, BK * PARTS)
        begin, past = groups_between(p_ends, groups, rows, first, B, BG)
        for group in range(begin, past):  # pyright: ignore[reportArgumentType]
            start, stop = rows_between(p_ends, group, rows, first, B)
            if start < stop:
                is_member = ((i_row >= start) & (i_row < stop))[:, None]
                if PAIRS:
                    largest = tl.reduce(tl.where(is_member, x, 0), 0, larger_pair)
                    low, high = magnitudes(largest)
                    magnitude = tl.interleave(low, high)
                else:
                    magnitude = tl.where(is_member, tl.abs(x.to(tl.float32)), 0.0)
                    magnitude = tl.max(magnitude, 0)
                bits = tl.cast(tl.maximum(magnitude, 0.0), tl.int32, bitcast=True)
                p_group = p_amax + tl.cast(group, tl.int64) * (columns * PARTS)
                m_value = i_value < columns * PARTS
                tl.atomic_max(p_group + i_value, bits, mask=m_value, sem="relaxed")


def amax(x: Tensor, *, noop: Tensor | None = None) -> Tensor:
    """Largest magnitude of ``x`` as float32 ``(1,)``; NaN is ignored, nothing gives zero."""
    rows = x.reshape(-1, x.shape[-1] if x.ndim else 1) if x.numel() else x.new_zeros(0, 1)
    return _amax(rows, None, noop)


def group_amax(x_MK: Tensor, ends_G: Tensor, *, noop: Tensor | None = None) -> Tensor:
    """Largest magnitude of each group's rows as float32 ``(G,)``; the tail is not read."""
    return _amax(x_MK, ends_G, noop)


def column_amax(
    x_MK: Tensor, ends_G: Tensor | None = None, *, noop: Tensor | None = None
) -> Tensor:
    """Largest magnitude of each column, or of each group's, as float32 ``(1, K)`` or ``(G, K)``."""
    groups = group_number(ends_G)
    amax_GK = torch.zeros(groups, x_MK.shape[1], dtype=torch.int32, device=x_MK.device)
    is_large = len(x_MK) >= groups * _ROWS_OF_A_LARGE_GROUP
    tile = _LARGE_STRIP if is_large else _SMALL_STRIP
    row_bytes = max(1, x_MK.shape[1]) * x_MK.itemsize
    tile = tile | {"cached_from": max(0, len(x_MK) - _CACHED_BYTES // row_bytes)}
    _over_tiles(_column_amax_kernel, x_MK, amax_GK, ends_G, noop, tile)
    return amax_GK.view(torch.float32)


def _amax(x_MK: Tensor, ends_G: Tensor | None, noop: Tensor | None) -> Tensor:
    amax_G = torch.zeros(group_number(ends_G), dtype=torch.int32, device=x_MK.device)
    tile = _AMAX_WORDS if are_words(x_MK) else _AMAX_VALUES
    _over_tiles(_amax_kernel, x_MK, amax_G, ends_G, noop, tile)
    return amax_G.view(torch.float32)


def _over_tiles(
    kernel: Any,
    x_MK: Tensor,
    amax: Tensor,
    ends_G: Tensor | None,
    noop: Tensor | None,
    tile: dict[str, Any],
) -> None:
    """Start a program for each tile of ``x_MK``, whose columns are words where they can be."""
    x_MK = unit_columns(x_MK)
    is_pairs = are_words(x_MK)
    x_MK = x_MK.view(torch.int32) if is_pairs else x_MK
    rows, columns = x_MK.shape
    groups = group_number(ends_G)
    programs = ceil_div(rows, tile["B"]) * ceil_div(columns, tile["BK"])
    if programs:
        kernel[(programs,)](
            x_MK,
            amax,
            _ends(ends_G),
            noop,
            groups,
            rows,
            columns,
            x_MK.stride(0),
            BG=next_power_of_2(groups),
            PAIRS=is_pairs,
            **tile,
        )


def _ends(ends_G: Tensor | None) -> Tensor | None:
    return None if ends_G is None else ends_G.contiguous()


@triton.jit
def _scale_kernel(
    p_amax,
    p_scale,
    p_scale_inv,
    p_noop,
    count,
    largest,
    epsilon,
    value_for_inf,
    exact,
    BLOCK: tl.constexpr,
):
    if p_noop is not None and tl.load(p_noop) != 0:
        return
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    amax = tl.load(p_amax + i, mask=i < count, other=0)
    scale, inverse = scale_of(amax, largest, epsilon, value_for_inf, exact)
    tl.store(p_scale + i, scale, mask=i < count)
    if p_scale_inv is not None:
        tl.store(p_scale_inv + i, inverse, mask=i < count)


def scale_from_amax(
    amax: Tensor,
    *,
    largest: float,
    power_of_two: bool = False,
    epsilon: float = 0.0,
    value_for_inf: float = FLOAT32_MAX,
) -> Tensor:
    """The float32 factor that brings ``amax`` to ``largest``; one where amax says nothing."""
    return fill_scales(
        amax, (largest, float(epsilon), value_for_inf, None if power_of_two else 1), None
    )


def fill_scales(
    amax: Tensor,
    scaling: Scaling,
    scale_inv: Tensor | None,
    noop: Tensor | None = None,
) -> Tensor:
    """The scales, and into ``scale_inv``, if given, their inverses."""
    amax = amax.contiguous()
    scale, count = torch.empty_like(amax), amax.numel()
    if count:
        tile: dict[str, Any] = {"BLOCK": 256}
        _make_scales(ceil_div(count, 256), amax, scale, scale_inv, noop, count, *scaling, **tile)
    return scale


@triton.jit
def _groups_of(p_ends, groups, i_row, BG: tl.constexpr):
    """The group of each row: how many groups end before it, all of them in the tail."""
    count = tl.zeros_like(i_row)
    for i in range(0, groups, BG):
        i_group = i + tl.arange(0, BG)
        ends = tl.load(p_ends + i_group, mask=i_group < groups, other=0x7FFFFFFF)
        count += tl.sum((ends[None, :] <= i_row[:, None]).to(tl.int32), 1)
    return count


@triton.jit
def _multiply_kernel(
    p_from,
    p_scale,
    p_to,
    p_ends,
    p_noop,
    groups,
    rows,
    columns,
    from_stride,
    scale_group_stride,
    scale_row_stride,
    scale_column_stride,
    B: tl.constexpr,
    BK: tl.constexpr,
    BG: tl.constexpr,
):
    """Values times their scale, cast to what ``p_to`` points to: both directions are this."""
    if p_noop is not None and tl.load(p_noop) != 0:
        return
    # From the end: what a pass over the values has read last is still in the cache.
    i_program = tl.num_programs(0) - 1 - tl.program_id(0)
    chunks = tl.cdiv(columns, BK)
    # As many neighbours a thread in codes as in values: nothing has to change threads.
    i_column = tl.max_contiguous(i_program % chunks * BK + tl.arange(0, BK), 8)
    i_row = i_program // chunks * B + tl.arange(0, B)
    m_column = (i_column < columns)[None, :]
    m_write = (i_row < rows)[:, None]
    # The tail is written, as zeros, and never read.
    end = rows if p_ends is None else tl.minimum(tl.load(p_ends + groups - 1), rows)
    m_read = (i_row < end)[:, None]
    o_row = i_row.to(tl.int64)[:, None]
    # All values are asked for before a group is looked for, or each would wait for its scale.
    p_tile = p_from + o_row * from_stride + i_column[None, :]
    mask = m_read & m_column
    value = tl.load(p_tile, mask=mask, other=0.0)
    o_scale = tl.zeros([B, 1], tl.int64)
    if p_ends is not None:
        group = _groups_of(p_ends, groups, i_row, BG)
        o_scale += (group.to(tl.int64) * scale_group_stride)[:, None]
    if scale_row_stride is not None:
        o_scale += o_row * scale_row_stride
    if scale_column_stride is not None:
        p_scales = p_scale + o_scale + (i_column * scale_column_stride)[None, :]
        scale = tl.load(p_scales, mask=mask, other=0)
    else:
        scale = tl.load(p_scale + o_scale, mask=m_read, other=0)
    value = value.to(tl.float32) * scale
    p_tile = p_to + o_row * columns + i_column[None, :]
    tl.store(p_tile, value.to(p_to.dtype.element_ty), mask=m_write & m_column)


_make_scales, _multiply_all = Launcher(_scale_kernel), Launcher(_multiply_kernel)


def quantize_scaled(
    x_MK: Tensor,
    scale: Tensor,
    code_dtype: torch.dtype,
    ends_G: Tensor | None = None,
    *,
    into: Into | None = None,
) -> Tensor:
    """Codes of ``float32(x) * scale``, saturating, as bytes ``(M, K)``; NaN stays NaN."""
    codes_MK = new_bytes(*x_MK.shape, like=x_MK) if into is None else into.buffers[0]
    _multiply(unit_columns(x_MK), scale, codes_MK.view(code_dtype), ends_G, noop_of(into))
    return codes_MK


def dequantize_scaled(
    codes_MK: Tensor,
    scale_inv: Tensor,
    code_dtype: torch.dtype,
    dtype: torch.dtype,
    ends_G: Tensor | None = None,
) -> Tensor:
    """``float32(code) * scale_inv`` rounded once to ``dtype``; rows past the groups are zero."""
    y_MK = torch.empty(codes_MK.shape, dtype=dtype, device=codes_MK.device)
    _multiply(unit_columns(codes_MK).view(code_dtype), scale_inv, y_MK, ends_G, None)
    return y_MK


def _multiply(
    from_MK: Tensor,
    scale: Tensor,
    to_MK: Tensor,
    ends_G: Tensor | None,
    noop: Tensor | None,
) -> None:
    rows, columns = from_MK.shape
    groups = group_number(ends_G)
    BK = min(_COLUMNS, max(16, next_power_of_2(columns)))
    tile: dict[str, Any] = {
        "B": min(_ROWS, _VALUES // BK),
        "BK": BK,
        "BG": min(_GROUPS, next_power_of_2(groups)),
    }
    programs = ceil_div(rows, tile["B"]) * ceil_div(columns, BK)
    per_column = scale.ndim == 2 and scale.shape[1] > 1
    per_row = ends_G is None and scale.ndim == 2 and scale.shape[0] > 1
    if programs:
        _multiply_all(
            programs,
            from_MK,
            scale,
            to_MK,
            _ends(ends_G),
            noop,
            groups,
            rows,
            columns,
            from_MK.stride(0),
            scale.stride(0),
            scale.stride(0) if per_row else None,
            scale.stride(1) if per_column else None,
            **tile,
        )
