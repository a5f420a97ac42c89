"""Codes that share a float32 scale: per tensor, group, row or column.

The hardware's cast is the definition's: it rounds to nearest even, a value past the largest
code becomes the largest code, and every NaN becomes 0x7F.

A program owns B rows of some columns and goes over the groups that these rows belong to,
mostly one.  Rows past the end of a group's are not masked: their place is taken by its last
row, once more, which changes no maximum and writes the same bytes again.

Letters: M rows, K columns, G groups, B rows of a program, BR rows of a step.
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
from backstash.kernels.cast.scales import Scaling, scale_of
from backstash.kernels.reference.cast import FLOAT32_MAX
from backstash.kernels.reference.into import Into, noop_of

_ROWS, _STEP, _COLUMNS = 32, 32, 256
_AMAX_COLUMNS, _AMAX_VALUES, _COLUMN_ROWS = 1024, 8192, 128


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
):
    """The largest magnitude of each group: a program reads a tile, then finds out whose it is."""
    if p_noop is not None and tl.load(p_noop) != 0:
        return
    chunks = tl.cdiv(columns, BK)
    first = (tl.program_id(0) // chunks) * B
    i_column = tl.program_id(0) % chunks * BK + tl.arange(0, BK)
    end = rows if p_ends is None else tl.minimum(tl.load(p_ends + groups - 1), rows)
    # The tail is not read.
    if first < end:
        i_row = tl.minimum(first + tl.arange(0, B), end - 1)
        p_tile = p_x + (i_row.to(tl.int64) * row_stride)[:, None] + i_column[None, :]
        x = tl.load(p_tile, mask=(i_column < columns)[None, :], other=0).to(tl.float32)
        magnitude = tl.abs(x)
        # Bits of floats that are not negative are ordered as the floats are.
        if p_ends is None:
            bits = tl.cast(tl.maximum(tl.max(magnitude), 0.0), tl.int32, bitcast=True)
            tl.atomic_max(p_amax, bits, sem="relaxed")
        else:
            begin, past = groups_between(p_ends, groups, rows, first, B, BG)
            for group in range(begin, past):  # pyright: ignore[reportArgumentType]
                start, stop = rows_between(p_ends, group, rows, first, B)
                is_member = (i_row >= start) & (i_row < stop)
                # The maximum with a NaN is the other operand: a NaN does not count.
                largest = tl.max(tl.where(is_member[:, None], magnitude, 0.0))
                bits = tl.cast(tl.maximum(largest, 0.0), tl.int32, bitcast=True)
                tl.atomic_max(p_amax + group, bits, sem="relaxed")


@triton.jit
def _column_amax_kernel(
    p_x,
    p_amax,
    p_ends,
    p_noop,
    groups,
    rows,
    columns,
    row_stride,
    B: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    BG: tl.constexpr,
):
    """The largest magnitude of each column of each group."""
    if p_noop is not None and tl.load(p_noop) != 0:
        return
    chunks = tl.cdiv(columns, BK)
    first = (tl.program_id(0) // chunks) * B
    i_column = tl.program_id(0) % chunks * BK + tl.arange(0, BK)
    m_column = i_column < columns
    begin, past = groups_between(p_ends, groups, rows, first, B, BG)
    for group in range(begin, past):  # pyright: ignore[reportArgumentType]
        start, end = rows_between(p_ends, group, rows, first, B)
        if start < end:
            largest = tl.zeros([BR, BK], tl.float32)
            for i in range(start, end, BR):
                i_row = tl.minimum(i + tl.arange(0, BR), end - 1).to(tl.int64)
                p_tile = p_x + (i_row * row_stride)[:, None] + i_column[None, :]
                x = tl.load(p_tile, mask=m_column[None, :], other=0).to(tl.float32)
                # The maximum with a NaN is the other operand: a NaN does not count.
                largest = tl.maximum(largest, tl.abs(x))
            bits = tl.cast(tl.max(largest, 0), tl.int32, bitcast=True)
            p_group = p_amax + tl.cast(group, tl.int64) * columns
            tl.atomic_max(p_group + i_column, bits, mask=m_column, sem="relaxed")


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
    x_MK = unit_columns(x_MK)
    rows, columns = x_MK.shape
    groups = group_number(ends_G)
    amax_GK = torch.zeros(groups, columns, dtype=torch.int32, device=x_MK.device)
    tile = _amax_tile(columns, groups)
    # Few rows a program would mean many atomics for each column.
    tile |= {"BR": tile["B"], "B": max(_COLUMN_ROWS, tile["B"])}
    programs = triton.cdiv(rows, tile["B"]) * triton.cdiv(columns, tile["BK"])
    if programs:
        _column_amax_kernel[(programs,)](
            x_MK, amax_GK, _ends(ends_G), noop, groups, rows, columns, x_MK.stride(0), **tile
        )
    return amax_GK.view(torch.float32)


def _amax(x_MK: Tensor, ends_G: Tensor | None, noop: Tensor | None) -> Tensor:
    x_MK = unit_columns(x_MK)
    rows, columns = x_MK.shape
    groups = group_number(ends_G)
    amax_G = torch.zeros(groups, dtype=torch.int32, device=x_MK.device)
    tile = _amax_tile(columns, groups)
    programs = triton.cdiv(rows, tile["B"]) * triton.cdiv(columns, tile["BK"])
    if programs:
        _amax_kernel[(programs,)](
            x_MK, amax_G, _ends(ends_G), noop, groups, rows, columns, x_MK.stride(0), **tile
        )
    return amax_G.view(torch.float32)


def _amax_tile(columns: int, groups: int) -> dict[str, Any]:
    """A program that only reads is fastest where it reads far along a row."""
    BK = min(_AMAX_COLUMNS, max(16, triton.next_power_of_2(columns)))
    return {"B": _AMAX_VALUES // BK, "BK": BK, "BG": triton.next_power_of_2(groups)}


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
        _scale_kernel[(triton.cdiv(count, 256),)](
            amax, scale, scale_inv, noop, count, *scaling, **tile
        )
    return scale


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
    BR: tl.constexpr,
    BK: tl.constexpr,
    BG: tl.constexpr,
):
    """Values times their scale, cast to what ``p_to`` points to: both directions are this."""
    if p_noop is not None and tl.load(p_noop) != 0:
        return
    # From the end: what a pass over the values has read last is still in the cache.
    i_program = tl.num_programs(0) - 1 - tl.program_id(0)
    chunks = tl.cdiv(columns, BK)
    first = (i_program // chunks) * B
    i_column = i_program % chunks * BK + tl.arange(0, BK)
    m_column = i_column < columns
    begin, past = groups_between(p_ends, groups, rows, first, B, BG)
    for group in range(begin, past):  # pyright: ignore[reportArgumentType]
        start, end = rows_between(p_ends, group, rows, first, B)
        p_group = p_scale + tl.cast(group, tl.int64) * scale_group_stride
        for i in range(start, end, BR):
            i_row = tl.minimum(i + tl.arange(0, BR), end - 1).to(tl.int64)
            p_tile = p_from + (i_row * from_stride)[:, None] + i_column[None, :]
            value = tl.load(p_tile, mask=m_column[None, :], other=0.0).to(tl.float32)
            if scale_row_stride is not None:
                value *= tl.load(p_scale + i_row * scale_row_stride)[:, None]
            elif scale_column_stride is not None:
                p_column = p_group + i_column * scale_column_stride
                value *= tl.load(p_column, mask=m_column, other=0)[None, :]
            else:
                value *= tl.load(p_group)
            p_tile = p_to + (i_row * columns)[:, None] + i_column[None, :]
            tl.store(p_tile, value.to(p_to.dtype.element_ty), mask=m_column[None, :])
    if p_ends is not None:
        # The tail is written, as zeros, and never read.
        tail = tl.maximum(tl.load(p_ends + groups - 1), first)
        for i in range(tail, tl.minimum(first + B, rows), BR):
            i_row = tl.minimum(i + tl.arange(0, BR), rows - 1).to(tl.int64)
            mask = (i_row < first + B)[:, None] & m_column[None, :]
            p_tile = p_to + (i_row * columns)[:, None] + i_column[None, :]
            tl.store(p_tile, tl.zeros([BR, BK], tl.float32).to(p_to.dtype.element_ty), mask=mask)


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
    tile = _tile(columns, ends_G)
    programs = triton.cdiv(rows, tile["B"]) * triton.cdiv(columns, tile["BK"])
    per_column = scale.ndim == 2 and scale.shape[1] > 1
    per_row = ends_G is None and scale.ndim == 2 and scale.shape[0] > 1
    if programs:
        _multiply_kernel[(programs,)](
            from_MK,
            scale,
            to_MK,
            _ends(ends_G),
            noop,
            group_number(ends_G),
            rows,
            columns,
            from_MK.stride(0),
            scale.stride(0),
            scale.stride(0) if per_row else None,
            scale.stride(1) if per_column else None,
            **tile,
        )


def _tile(columns: int, ends_G: Tensor | None) -> dict[str, Any]:
    """The constants of a launch."""
    BK = min(_COLUMNS, max(16, triton.next_power_of_2(columns)))
    return {"B": _ROWS, "BR": _STEP, "BK": BK, "BG": triton.next_power_of_2(group_number(ends_G))}
