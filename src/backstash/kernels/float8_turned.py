"""Float8 rows and turned (transposed) columns of groups on a GPU, from two readings of the values.

The first reading finds the largest magnitudes of all rows and of all columns of each group, a
tile at a time; the second casts a tile twice and writes it once as it lies and once turned.
Quantizing rows, quantizing columns and turning them one after the other would read the values
three times and the codes of the columns once more.

Rows that a map names are read once for each of their copies.  A few columns of all of them fit
into the cache, so both readings go over them a strip of columns at a time.

Letters: T rows of the buffer, K columns, G groups, P columns with padding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.blocks import (
    block_count,
    locate_block,
    new_bytes,
    unit_columns,
    write_table,
)
from backstash.kernels.cast.scaled import fill_scales
from backstash.kernels.cast.scales import Scaling, scaling_of
from backstash.kernels.float8_matmul import pad_ends, turned_places, zero_empty_group
from backstash.kernels.launches import Launcher
from backstash.kernels.reference.float8_mm import FLOAT8_UNIT, padded_columns
from backstash.kernels.reference.float8_turned import Turned
from backstash.kernels.sizes import ceil_div, next_power_of_2

_ROWS = 128
_AMAX_TILE: dict[str, Any] = {"B": _ROWS, "BR": 16, "BK": 128, "num_warps": 2}
_TILE: dict[str, Any] = {"B": _ROWS, "BK": 128, "UNIT": FLOAT8_UNIT, "num_warps": 8}
# What is read from the cache is there sooner: smaller programs, more of them at a time.
_GATHERED_TILE: dict[str, Any] = {**_TILE, "BK": 64, "num_warps": 4}
# Numbers that a program of the first launch sets to zero.
_ZEROS = 4096


@triton.jit
def _prepare_kernel(
    p_ends,
    p_table,
    p_padded,
    p_zeros,
    groups,
    rows,
    blocks,
    count,
    B: tl.constexpr,
    UNIT: tl.constexpr,
    BG: tl.constexpr,
    CHUNK: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """The table of blocks, the ends after padding, and zeros for largest magnitudes."""
    i_program = tl.program_id(0)
    if i_program <= groups:
        write_table(p_ends, p_table, i_program, groups, rows, blocks, B, BG, CHUNK)
        if i_program == groups:
            pad_ends(p_ends, p_padded, groups, rows, UNIT, BG)
    else:
        i_zero = (i_program - groups - 1) * ZEROS + tl.arange(0, ZEROS)
        tl.store(p_zeros + i_zero, tl.zeros([ZEROS], tl.int32), mask=i_zero < count)


@triton.jit
def _sources(p_source, i_row, m_row):
    """Where rows are read from: their own places, or those that a map names."""
    if p_source is None:
        i_from = i_row.to(tl.int64)
    else:
        i_from = tl.load(p_source + i_row, mask=m_row, other=0).to(tl.int64)
    return i_from


@triton.jit
def _place(p_source, blocks, chunks):
    """The block of rows and the columns of a program: strip after strip with a map."""
    if p_source is None:
        i_block, i_chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    else:
        i_block, i_chunk = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    return i_block, i_chunk


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
    blocks,
    B: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
):
    i_block, i_chunk = _place(p_source, blocks, tl.cdiv(columns, BK))
    i_column = i_chunk * BK + tl.arange(0, BK)
    first, end, group = locate_block(p_table, rows, i_block, B)
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
    blocks,
    turned_stride,
    B: tl.constexpr,
    BK: tl.constexpr,
    UNIT: tl.constexpr,
):
    """A tile of one group's rows; after all tiles, the unit of zeros of each empty group."""
    i_block, i_chunk = _place(p_source, blocks + groups, tl.cdiv(columns, BK))
    i_column = (i_chunk * BK + tl.arange(0, BK)).to(tl.int64)
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


_prepare = Launcher(_prepare_kernel)
_find_amax = Launcher(_amax_kernel)
_write_codes = Launcher(_quantize_kernel)


class Prepared(NamedTuple):
    """What the launches over groups of rows share.

    The table of blocks of 128 rows, how many these are, the ends after padding, and zeros.
    """

    table: Tensor
    blocks: int
    padded_ends_G: Tensor
    zeros: Tensor


def prepare(ends_G: Tensor, rows: int, zeros: int) -> Prepared:
    """Write all of it in one launch; ``ends_G`` is int32, its numbers side by side."""
    groups, blocks = len(ends_G), block_count(rows, ends_G, _ROWS)
    new: dict[str, Any] = {"dtype": torch.int32, "device": ends_G.device}
    table_S4 = torch.empty(blocks, 4, **new)
    padded_G, zeros_N = torch.empty(groups, **new), torch.empty(zeros, **new)
    tile: dict[str, Any] = {
        "B": _ROWS,
        "UNIT": FLOAT8_UNIT,
        "BG": next_power_of_2(groups),
        "CHUNK": 256,
        "ZEROS": _ZEROS,
    }
    _prepare(
        groups + 1 + ceil_div(zeros, _ZEROS),
        ends_G,
        table_S4,
        padded_G,
        zeros_N,
        groups,
        rows,
        blocks,
        zeros,
        **tile,
    )
    return Prepared(table_S4, blocks, padded_G, zeros_N)


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
    scaling = scaling_of(code_dtype, epsilon, power_of_two=power_of_two)
    return _quantize((unit_columns(x_TK), source_T), code_dtype, ends_G, None, scaling)[1]


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
    scaling = scaling_of(code_dtype, epsilon, power_of_two=power_of_two)
    x = unit_columns(x_TK), None
    scale_inv_T, turned = _quantize(x, code_dtype, ends_G, codes_TK, scaling)
    return (codes_TK, scale_inv_T.unsqueeze(1)), turned


def _quantize(
    x: tuple[Tensor, Tensor | None],
    code_dtype: torch.dtype,
    ends_G: Tensor,
    codes_TK: Tensor | None,
    scaling: Scaling,
) -> tuple[Tensor, Turned]:
    """Inverse scales of rows and turned columns; the codes of rows into what is given for them.

    Without ``codes_TK`` rows have no scales.
    """
    x_TK, source_T = x
    (rows, columns), groups = x_TK.shape, len(ends_G)
    if source_T is not None:
        rows, source_T = len(source_T), source_T.contiguous()
    ends_G = ends_G.int().contiguous()
    scaled_rows = 0 if codes_TK is None else rows
    # Scales of rows and of columns in one buffer, both at an address of whole 16 bytes.
    start = -(-scaled_rows // 4) * 4
    table, blocks, padded_G, amax = prepare(ends_G, rows, start + groups * columns)
    sizes = groups, rows, columns, x_TK.stride(0), blocks
    programs = blocks * ceil_div(columns, _AMAX_TILE["BK"])
    if programs:
        amax_T = None if codes_TK is None else amax
        _find_amax(programs, x_TK, source_T, amax[start:], amax_T, table, *sizes, **_AMAX_TILE)
    amax = amax.view(torch.float32)
    scale_inv = torch.empty_like(amax)
    scale = fill_scales(amax, scaling, scale_inv)
    turned_KP = new_bytes(columns, padded_columns(rows, groups), like=x_TK).view(code_dtype)
    tile = _TILE if source_T is None else _GATHERED_TILE
    programs = (blocks + groups) * ceil_div(columns, tile["BK"])
    if programs:
        _write_codes(
            programs,
            x_TK,
            source_T,
            scale[start:],
            None if codes_TK is None else scale,
            turned_KP,
            codes_TK.view(code_dtype) if codes_TK is not None and rows else None,
            ends_G,
            padded_G,
            table,
            *sizes,
            turned_KP.stride(0),
            **tile,
        )
    scale_inv_GK = scale_inv[start:].view(groups, columns)
    return scale_inv[:scaled_rows], Turned(turned_KP, scale_inv_GK, padded_G)
