"""MXFP8 on a GPU: blocks of 32 with a power of two, along rows, down columns, or in tiles.

A block along a row is a line of a tile's last dimension.  For blocks down columns one warp has
32 rows of some columns in its registers, so that nobody waits for anybody: it finds the largest
values and casts what it has.  Where both directions are wanted it does so twice with the same
registers, and every value is read once.

Letters: M rows, K columns, G groups, S blocks of rows, C blocks of columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.blocks import (
    block_count,
    block_table,
    group_number,
    locate_block,
    new_bytes,
    unit_columns,
)
from backstash.kernels.cast.exponents import exponent_of, factor_of, multiplier_of
from backstash.kernels.reference.into import Into, noop_of
from backstash.kernels.sizes import ceil_div, next_power_of_2

_BLOCK = 32
# Codes along rows need no block of rows: few rows and many slices fill whole sectors.
_ROWS, _ROW_SLICES, _ROW_STEPS = 4, 32, 4
# Columns of a tile, columns of a thread side by side; and tiles of a program.
_TILE: dict[str, Any] = {"BK": 64, "V": 8, "num_warps": 1}
_VALUES_TILE: dict[str, Any] = {"BK": 256, "V": 8, "num_warps": 4}
_STEPS = 2

Buffers = tuple[Tensor, Tensor]


@triton.jit
def _quantize_rows_kernel(
    p_x,
    p_codes,
    p_exponents,
    p_noop,
    rows,
    columns,
    row_stride,
    B: tl.constexpr,
    BS: tl.constexpr,
    STEPS: tl.constexpr,
    OFFSET: tl.constexpr,
):
    if p_noop is not None and tl.load(p_noop) != 0:
        return
    slices = tl.cdiv(columns, 32)
    chunks = tl.cdiv(slices, BS * STEPS)
    first = tl.cast(tl.program_id(0) // chunks, tl.int64) * B
    p_x += first * row_stride
    p_codes += first * columns
    p_exponents += first * slices
    i_row = tl.arange(0, B)
    m_row = first + i_row < rows
    o_row = i_row.to(OFFSET)
    for i_step in range(STEPS):
        i_slice = (tl.program_id(0) % chunks * STEPS + i_step) * BS + tl.arange(0, BS)
        i_column = i_slice[:, None] * 32 + tl.arange(0, 32)[None, :]
        mask = m_row[:, None, None] & (i_column < columns)[None, :, :]
        o_tile = o_row[:, None, None] * row_stride + i_column[None, :, :]
        x = tl.load(p_x + o_tile, mask=mask, other=0).to(tl.float32)
        # The maximum with a NaN is the other operand: a NaN does not count.
        exponent = exponent_of(tl.maximum(tl.max(tl.abs(x), 2), 0.0))
        codes = (x * multiplier_of(exponent)[:, :, None]).to(tl.float8e4nv)
        o_codes = o_row[:, None, None] * columns + i_column[None, :, :]
        tl.store(p_codes + o_codes, codes, mask=mask)
        o_exponents = o_row[:, None] * slices + i_slice[None, :]
        m_exponents = m_row[:, None] & (i_slice < slices)[None, :]
        tl.store(p_exponents + o_exponents, exponent.to(tl.uint8), mask=m_exponents)


@triton.jit
def _quantize_blocks_kernel(
    p_x,
    p_row_codes,
    p_row_exponents,
    p_codes,
    p_column_exponents,
    p_tile_exponents,
    p_table,
    p_noop,
    groups,
    rows,
    columns,
    row_stride,
    B: tl.constexpr,
    BK: tl.constexpr,
    V: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Codes down columns or in tiles; and, with a place for them, those along rows."""
    if p_noop is not None and tl.load(p_noop) != 0:
        return
    BS: tl.constexpr = BK // 32
    chunks = tl.cdiv(columns, BK * STEPS)
    i_block = tl.program_id(0) // chunks
    i_chunk = tl.program_id(0) % chunks
    first, end, group = locate_block(p_table, rows, i_block, B)
    o_block, slices = tl.cast(i_block, tl.int64), tl.cdiv(columns, 32)
    for i_step in tl.static_range(STEPS):  # pyright: ignore[reportGeneralTypeIssues]
        i_tile = i_chunk * STEPS + i_step
        # A thread gets V columns side by side, and many rows of each.
        i_column = tl.max_contiguous(i_tile * BK + tl.arange(0, BK), V)
        m_column = i_column < columns
        i_slice = i_tile * BS + tl.arange(0, BS)
        m_slice = i_slice < slices
        exponent, tile_exponent = tl.zeros([BK], tl.int32), tl.zeros([BS], tl.int32)
        # A block that no group needs has exponents of zero, and nothing else.
        if group < groups:
            # A row past the end is the last row once more: it changes no maximum, and no byte.
            i_row = tl.minimum(first + tl.arange(0, B), end - 1).to(tl.int64)
            p_tile = p_x + (i_row * row_stride)[:, None] + i_column[None, :]
            x = tl.load(p_tile, mask=m_column[None, :], other=0).to(tl.float32)
            magnitude = tl.abs(x)
            o_tile = (i_row * columns)[:, None] + i_column[None, :]
            # The maximum with a NaN is the other operand: a NaN does not count.
            largest = tl.maximum(tl.max(magnitude, 0), 0.0)
            if p_tile_exponents is None:
                exponent = exponent_of(largest)
                multiplier = multiplier_of(exponent)
            else:
                tile_exponent = exponent_of(tl.max(tl.reshape(largest, [BS, 32]), 1))
                multiplier = tl.broadcast_to(multiplier_of(tile_exponent)[:, None], [BS, 32])
                multiplier = tl.reshape(multiplier, [BK])
            codes = (x * multiplier[None, :]).to(tl.float8e4nv)
            tl.store(p_codes + o_tile, codes, mask=m_column[None, :])
            if p_row_codes is not None:
                row_amax = tl.maximum(tl.max(tl.reshape(magnitude, [B, BS, 32]), 2), 0.0)
                row_exponent = exponent_of(row_amax)
                multiplier = multiplier_of(row_exponent)[:, :, None]
                multiplier = tl.reshape(tl.broadcast_to(multiplier, [B, BS, 32]), [B, BK])
                codes = (x * multiplier).to(tl.float8e4nv)
                tl.store(p_row_codes + o_tile, codes, mask=m_column[None, :])
                p_row = p_row_exponents + (i_row * slices)[:, None] + i_slice[None, :]
                tl.store(p_row, row_exponent.to(tl.uint8), mask=m_slice[None, :])
        if p_tile_exponents is None:
            p_exponent = p_column_exponents + o_block * columns + i_column
            tl.store(p_exponent, exponent.to(tl.uint8), mask=m_column)
        else:
            p_exponent = p_tile_exponents + o_block * slices + i_slice
            tl.store(p_exponent, tile_exponent.to(tl.uint8), mask=m_slice)


@triton.jit
def _dequantize_rows_kernel(
    p_codes,
    p_exponents,
    p_y,
    rows,
    columns,
    row_stride,
    B: tl.constexpr,
    BS: tl.constexpr,
    STEPS: tl.constexpr,
    OFFSET: tl.constexpr,
):
    slices = tl.cdiv(columns, 32)
    chunks = tl.cdiv(slices, BS * STEPS)
    first = tl.cast(tl.program_id(0) // chunks, tl.int64) * B
    p_codes += first * row_stride
    p_exponents += first * slices
    p_y += first * columns
    i_row = tl.arange(0, B)
    m_row = first + i_row < rows
    o_row = i_row.to(OFFSET)
    for i_step in range(STEPS):
        i_slice = (tl.program_id(0) % chunks * STEPS + i_step) * BS + tl.arange(0, BS)
        i_column = i_slice[:, None] * 32 + tl.arange(0, 32)[None, :]
        i_column = tl.max_contiguous(i_column, [1, 16])
        p_exponent = p_exponents + o_row[:, None] * slices + i_slice[None, :]
        m_exponent = m_row[:, None] & (i_slice < slices)[None, :]
        exponent = tl.load(p_exponent, mask=m_exponent, other=0).to(tl.int32)
        mask = m_row[:, None, None] & (i_column < columns)[None, :, :]
        p_tile = p_codes + (o_row[:, None, None] * row_stride + i_column[None, :, :])
        y = tl.load(p_tile, mask=mask, other=0.0).to(tl.float32)
        y = (y * factor_of(exponent)[:, :, None]).to(p_y.dtype.element_ty)
        tl.store(p_y + (o_row[:, None, None] * columns + i_column[None, :, :]), y, mask=mask)


@triton.jit
def _dequantize_blocks_kernel(
    p_codes,
    p_column_exponents,
    p_tile_exponents,
    p_y,
    p_table,
    groups,
    rows,
    columns,
    row_stride,
    B: tl.constexpr,
    BK: tl.constexpr,
    V: tl.constexpr,
):
    BS: tl.constexpr = BK // 32
    chunks = tl.cdiv(columns, BK)
    i_block = tl.program_id(0) // chunks
    i_chunk = tl.program_id(0) % chunks
    first, end, group = locate_block(p_table, rows, i_block, B)
    o_block = tl.cast(i_block, tl.int64)
    # The tail is written, as zeros, and never read.
    read_columns = tl.where(group < groups, columns, 0)
    if first < end:
        i_column = tl.max_contiguous(i_chunk * BK + tl.arange(0, BK), V)
        m_column = i_column < columns
        m_read = i_column < read_columns
        if p_column_exponents is not None:
            p_exponent = p_column_exponents + o_block * columns + i_column
            factor = factor_of(tl.load(p_exponent, mask=m_read, other=0).to(tl.int32))
        else:
            i_slice = i_chunk * BS + tl.arange(0, BS)
            p_exponent = p_tile_exponents + o_block * tl.cdiv(columns, 32) + i_slice
            m_slice = i_slice < tl.cdiv(read_columns, 32)
            factor = factor_of(tl.load(p_exponent, mask=m_slice, other=0).to(tl.int32))
            factor = tl.reshape(tl.broadcast_to(factor[:, None], [BS, 32]), [BK])
        # A row past the end is the last row once more, and the same bytes are written again.
        i_row = tl.minimum(first + tl.arange(0, B), end - 1).to(tl.int64)
        p_tile = p_codes + (i_row * row_stride)[:, None] + i_column[None, :]
        y = tl.load(p_tile, mask=m_read[None, :], other=0.0).to(tl.float32) * factor[None, :]
        p_tile = p_y + (i_row * columns)[:, None] + i_column[None, :]
        tl.store(p_tile, y.to(p_y.dtype.element_ty), mask=m_column[None, :])


def quantize_mx_rows(x_MK: Tensor, *, into: Into | None = None) -> Buffers:
    """MXFP8 along rows: codes ``(M, K)`` and exponents ``(M, ceil(K/32))``, both bytes."""
    codes_MK, exponent_MC = _buffers(x_MK, _row_shape(x_MK)) if into is None else into.buffers
    x_MK = unit_columns(x_MK)
    rows, columns = x_MK.shape
    tile, programs = _row_tile(x_MK)
    if programs:
        _quantize_rows_kernel[(programs,)](
            x_MK,
            codes_MK.view(torch.float8_e4m3fn),
            exponent_MC,
            noop_of(into),
            rows,
            columns,
            x_MK.stride(0),
            **tile,
        )
    return codes_MK, exponent_MC


def quantize_mx_columns(
    x_MK: Tensor, ends_G: Tensor | None = None, *, into: Into | None = None
) -> Buffers:
    """MXFP8 down columns: codes ``(M, K)`` in logical order and exponents ``(S, K)``, bytes."""
    codes_MK, exponent_SK = (
        _buffers(x_MK, _column_shape(x_MK, ends_G)) if into is None else into.buffers
    )
    _quantize_blocks(x_MK, ends_G, (None, None, codes_MK, exponent_SK, None), noop_of(into))
    return codes_MK, exponent_SK


def quantize_mx_both(
    x_MK: Tensor, ends_G: Tensor | None = None, *, into: Into | None = None
) -> tuple[Buffers, Buffers]:
    """Both of the above from one read of ``x_MK``; rows past the last group are unspecified."""
    if into is None:
        outputs = _buffers(x_MK, _row_shape(x_MK)) + _buffers(x_MK, _column_shape(x_MK, ends_G))
    else:
        outputs = into.buffers
    _quantize_blocks(x_MK, ends_G, (*outputs, None), noop_of(into))
    return (outputs[0], outputs[1]), (outputs[2], outputs[3])


def quantize_mx_tiles(
    x_MK: Tensor, ends_G: Tensor | None = None, *, into: Into | None = None
) -> Buffers:
    """MXFP8 in tiles of 32 by 32: codes ``(M, K)`` and exponents ``(S, ceil(K/32))``, bytes."""
    shape = block_count(len(x_MK), ends_G, _BLOCK), ceil_div(x_MK.shape[1], _BLOCK)
    codes_MK, exponent_SC = _buffers(x_MK, shape) if into is None else into.buffers
    _quantize_blocks(x_MK, ends_G, (None, None, codes_MK, None, exponent_SC), noop_of(into))
    return codes_MK, exponent_SC


def dequantize_mx_rows(codes_MK: Tensor, exponent_MC: Tensor, dtype: torch.dtype) -> Tensor:
    """Values ``(M, K)`` of :func:`quantize_mx_rows`."""
    codes_MK = unit_columns(codes_MK)
    rows, columns = codes_MK.shape
    y_MK = torch.empty(rows, columns, dtype=dtype, device=codes_MK.device)
    tile, programs = _row_tile(codes_MK)
    if programs:
        _dequantize_rows_kernel[(programs,)](
            codes_MK.view(torch.float8_e4m3fn),
            exponent_MC.contiguous(),
            y_MK,
            rows,
            columns,
            codes_MK.stride(0),
            **tile,
        )
    return y_MK


def dequantize_mx_columns(
    codes_MK: Tensor, exponent_SK: Tensor, dtype: torch.dtype, ends_G: Tensor | None = None
) -> Tensor:
    """Values ``(M, K)`` of :func:`quantize_mx_columns`; rows past the last group are zero."""
    return _dequantize_blocks(codes_MK, (exponent_SK.contiguous(), None), dtype, ends_G)


def dequantize_mx_tiles(
    codes_MK: Tensor, exponent_SC: Tensor, dtype: torch.dtype, ends_G: Tensor | None = None
) -> Tensor:
    """Values ``(M, K)`` of :func:`quantize_mx_tiles`; rows past the last group are zero."""
    return _dequantize_blocks(codes_MK, (None, exponent_SC.contiguous()), dtype, ends_G)


def _row_shape(x_MK: Tensor) -> tuple[int, int]:
    return len(x_MK), ceil_div(x_MK.shape[1], _BLOCK)


def _column_shape(x_MK: Tensor, ends_G: Tensor | None) -> tuple[int, int]:
    return block_count(len(x_MK), ends_G, _BLOCK), x_MK.shape[1]


def _buffers(x_MK: Tensor, exponents: tuple[int, int]) -> Buffers:
    return new_bytes(*x_MK.shape, like=x_MK), new_bytes(*exponents, like=x_MK)


def _quantize_blocks(
    x_MK: Tensor,
    ends_G: Tensor | None,
    outputs: tuple[Tensor | None, ...],
    noop: Tensor | None,
) -> None:
    """Fill codes and exponents along rows, if asked for, and those down columns or in tiles."""
    x_MK = unit_columns(x_MK)
    rows, columns = x_MK.shape
    row_codes, row_exponents, codes, column_exponents, tile_exponents = outputs
    tile = {"B": _BLOCK, **_TILE, "STEPS": min(_STEPS, max(1, ceil_div(columns, _TILE["BK"])))}
    programs = block_count(rows, ends_G, _BLOCK) * ceil_div(columns, tile["BK"] * tile["STEPS"])
    if programs:
        _quantize_blocks_kernel[(programs,)](
            x_MK,
            None if row_codes is None else row_codes.view(torch.float8_e4m3fn),
            row_exponents,
            None if codes is None else codes.view(torch.float8_e4m3fn),
            column_exponents,
            tile_exponents,
            block_table(ends_G, rows, _BLOCK),
            noop,
            group_number(ends_G),
            rows,
            columns,
            x_MK.stride(0),
            **tile,
        )


def _dequantize_blocks(
    codes_MK: Tensor,
    exponents: tuple[Tensor | None, Tensor | None],
    dtype: torch.dtype,
    ends_G: Tensor | None,
) -> Tensor:
    codes_MK = unit_columns(codes_MK)
    rows, columns = codes_MK.shape
    y_MK = torch.empty(rows, columns, dtype=dtype, device=codes_MK.device)
    tile = {"B": _BLOCK, **_VALUES_TILE}
    programs = block_count(rows, ends_G, _BLOCK) * ceil_div(columns, tile["BK"])
    if programs:
        _dequantize_blocks_kernel[(programs,)](
            codes_MK.view(torch.float8_e4m3fn),
            *exponents,
            y_MK,
            block_table(ends_G, rows, _BLOCK),
            group_number(ends_G),
            rows,
            columns,
            codes_MK.stride(0),
            **tile,
        )
    return y_MK


def _row_tile(x_MK: Tensor) -> tuple[dict[str, Any], int]:
    """The constants of a launch along rows, and how many programs it has."""
    rows, columns = x_MK.shape
    slices = ceil_div(columns, _BLOCK)
    BS = min(_ROW_SLICES, next_power_of_2(max(1, slices)))
    steps = min(_ROW_STEPS, max(1, ceil_div(slices, BS)))
    # The first row of a program is addressed in 64 bits; its others, from there, in fewer.
    farthest = (_ROWS + 1) * max(x_MK.stride(0), columns)
    offset: Any = tl.int32 if farthest < 2**31 else tl.int64
    programs = ceil_div(rows, _ROWS) * ceil_div(slices, BS * steps)
    return {"B": _ROWS, "BS": BS, "STEPS": steps, "OFFSET": offset}, programs
