"""Float8 rows and turned columns of groups on a GPU, from two readings of the values.

The first reading finds the largest magnitudes of all rows and of all columns of each group, a
tile at a time; the second casts a tile twice and writes it once as it lies and once turned.
Quantizing rows, quantizing columns and turning them one after the other would read the values
three times and the codes of the columns once more.

Letters: T rows of the buffer, K columns, G groups, P columns with padding.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.blocks import block_count, block_table, locate_block, new_bytes, unit_columns
from backstash.kernels.cast.scaled import scale_from_amax
from backstash.kernels.float8_matmul import turned_places, write_padded_ends, zero_empty_group
from backstash.kernels.reference.float8_mm import FLOAT8_UNIT, padded_columns
from backstash.kernels.reference.float8_turned import Turned

_ROWS = 128
_AMAX_TILE: dict[str, Any] = {"B": _ROWS, "BR": 16, "BK": 128, "num_warps": 2}
_TILE: dict[str, Any] = {"B": _ROWS, "BK": 128, "UNIT": FLOAT8_UNIT, "num_warps": 8}


@triton.jit
def _sources(p_source, i_row, m_row):
    """Where rows are read from: their own places, or those that a map names."""
    if p_source is None:
        i_from = i_row.to(tl.int64)
    else:
        i_from = tl.load(p_source + i_row, mask=m_row, other=0).to(tl.int64)
    return i_from


@triton.jit
def _amax_kernel(
    p_x,
    p_source,
    p_column_amax,
    p_row_amax,
    p_table,
    groups,
    rows,
    columns,
    row_stride,
    B: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
):
    chunks = tl.cdiv(columns, BK)
    i_column = (tl.program_id(0) % chunks) * BK + tl.arange(0, BK)
    first, end, group = locate_block(p_table, rows, tl.program_id(0) // chunks, B)
    if group < groups:
        largest = tl.zeros([BR, BK], tl.float32)
        for i in tl.static_range(0, B, BR):  # pyright: ignore[reportGeneralTypeIssues]
            i_row = first + i + tl.arange(0, BR)
            mask = (i_row < end)[:, None] & (i_column < columns)[None, :]
            i_from = _sources(p_source, i_row, i_row < end)
            p_tile = p_x + i_from[:, None] * row_stride + i_column[None, :]
            # The maximum with a NaN is the other operand: a NaN does not count.
            magnitude = tl.abs(tl.load(p_tile, mask=mask, other=0).to(tl.float32))
            largest = tl.maximum(largest, magnitude)
            if p_row_amax is not None:
                # Bits of floats that are not negative are ordered as the floats are.
                bits = tl.cast(tl.max(tl.maximum(magnitude, 0.0), 1), tl.int32, bitcast=True)
                tl.atomic_max(p_row_amax + i_row, bits, mask=i_row < end, sem="relaxed")
        bits = tl.cast(tl.max(largest, 0), tl.int32, bitcast=True)
        p_group = p_column_amax + tl.cast(group, tl.int64) * columns
        tl.atomic_max(p_group + i_column, bits, mask=i_column < columns, sem="relaxed")


@triton.jit
def _quantize_kernel(
    p_x,
    p_source,
    p_column_scale,
    p_row_scale,
    p_turned,
    p_codes,
    p_ends,
    p_padded,
    p_table,
    groups,
    rows,
    columns,
    row_stride,
    turned_stride,
    blocks,
    B: tl.constexpr,
    BK: tl.constexpr,
    UNIT: tl.constexpr,
):
    """A tile of one group's rows; after all tiles, the unit of zeros of each empty group."""
    chunks = tl.cdiv(columns, BK)
    i_block = tl.program_id(0) // chunks
    i_column = ((tl.program_id(0) % chunks) * BK + tl.arange(0, BK)).to(tl.int64)
    m_column = i_column < columns
    if i_block < blocks:
        first, end, group = locate_block(p_table, rows, i_block, B)
        if group < groups and first < end:
            to, last = turned_places(p_ends, p_padded, group, first, rows, B, UNIT)
            i_row = first + tl.arange(0, B)
            m_row = i_row < end
            mask = m_row[:, None] & m_column[None, :]
            i_from = _sources(p_source, i_row, m_row)
            p_tile = p_x + i_from[:, None] * row_stride + i_column[None, :]
            x = tl.load(p_tile, mask=mask, other=0).to(tl.float32)
            p_scale = p_column_scale + tl.cast(group, tl.int64) * columns
            scale = tl.load(p_scale + i_column, mask=m_column, other=0)
            turned = (x * scale[None, :]).to(p_turned.dtype.element_ty)
            i_to = to + tl.arange(0, B)
            p_tile = p_turned + i_column[:, None] * turned_stride + i_to.to(tl.int64)[None, :]
            tl.store(p_tile, tl.trans(turned), mask=m_column[:, None] & (i_to < last)[None, :])
            if p_codes is not None:
                scale = tl.load(p_row_scale + i_row, mask=m_row, other=0)
                codes = (x * scale[:, None]).to(p_codes.dtype.element_ty)
                p_tile = p_codes + i_row.to(tl.int64)[:, None] * columns + i_column[None, :]
                tl.store(p_tile, codes, mask=mask)
    else:
        zero_empty_group(
            p_turned,
            p_ends,
            p_padded,
            i_block - blocks,
            rows,
            i_column,
            m_column,
            turned_stride,
            UNIT,
        )


def quantize_float8_turned(
    x_TK: Tensor,
    code_dtype: torch.dtype,
    ends_G: Tensor,
    source_T: Tensor | None = None,
    *,
    epsilon: float = 0.0,
    power_of_two: bool = False,
) -> Turned:
    """The columns of ``quantize_float8_columns``, turned; rows are those that a map names."""
    options = {"epsilon": epsilon, "power_of_two": power_of_two}
    return _quantize((unit_columns(x_TK), source_T), code_dtype, ends_G, None, options)


def quantize_float8_rows_and_turned(
    x_TK: Tensor,
    code_dtype: torch.dtype,
    ends_G: Tensor,
    *,
    epsilon: float = 0.0,
    power_of_two: bool = False,
) -> tuple[tuple[Tensor, Tensor], Turned]:
    """The rows of ``quantize_float8_rows`` and the columns of :func:`quantize_float8_turned`."""
    codes_TK = new_bytes(*x_TK.shape, like=x_TK)
    scale_inv_T1 = torch.empty(len(x_TK), 1, dtype=torch.float32, device=x_TK.device)
    options = {"epsilon": epsilon, "power_of_two": power_of_two}
    rows = codes_TK.view(code_dtype), scale_inv_T1
    return (codes_TK, scale_inv_T1), _quantize(
        (unit_columns(x_TK), None), code_dtype, ends_G, rows, options
    )


def _quantize(
    x: tuple[Tensor, Tensor | None],
    code_dtype: torch.dtype,
    ends_G: Tensor,
    into_rows: tuple[Tensor, Tensor] | None,
    options: dict[str, Any],
) -> Turned:
    """Turned columns, and codes and inverse scales of rows into what is given for them."""
    x_TK, source_T = x
    (rows, columns), groups = x_TK.shape, len(ends_G)
    if source_T is not None:
        rows, source_T = len(source_T), source_T.contiguous()
    ends_G = ends_G.int().contiguous()
    padded_G = write_padded_ends(ends_G, rows)
    amax_GK = torch.zeros(groups, columns, dtype=torch.int32, device=x_TK.device)
    amax_T1 = None
    if into_rows is not None:
        amax_T1 = torch.zeros(rows, 1, dtype=torch.int32, device=x_TK.device)
    blocks, table = block_count(rows, ends_G, _ROWS), block_table(ends_G, rows, _ROWS)
    sizes = groups, rows, columns, x_TK.stride(0)
    programs = blocks * triton.cdiv(columns, _AMAX_TILE["BK"])
    if programs:
        _amax_kernel[(programs,)](x_TK, source_T, amax_GK, amax_T1, table, *sizes, **_AMAX_TILE)
    limits = {"largest": torch.finfo(code_dtype).max, **options}
    scale_GK = scale_from_amax(amax_GK.view(torch.float32), **limits)
    scale_T1 = None
    if into_rows is not None and amax_T1 is not None:
        scale_T1 = scale_from_amax(amax_T1.view(torch.float32), **limits)
        torch.div(torch.ones_like(scale_T1), scale_T1, out=into_rows[1])
    turned_KP = new_bytes(columns, padded_columns(rows, groups), like=x_TK).view(code_dtype)
    programs = (blocks + groups) * triton.cdiv(columns, _TILE["BK"])
    if programs:
        _quantize_kernel[(programs,)](
            x_TK,
            source_T,
            scale_GK,
            scale_T1,
            turned_KP,
            None if into_rows is None else into_rows[0],
            ends_G,
            padded_G,
            table,
            *sizes,
            turned_KP.stride(0),
            blocks,
            **_TILE,
        )
    return Turned(turned_KP, torch.ones_like(scale_GK) / scale_GK, padded_G)
