"""MXFP8 on a GPU: blocks of 32 with a power of two, along rows, down columns, or in tiles.

A program can write both directions of its 32 rows, which then come from memory once.  The
tile it reads has three dimensions, rows, slices and the 32 columns of a slice, so a block along
a row is a line of the last dimension and a block down a column a line of the first.

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

_BLOCK = 32
# How a program reads: B rows and BS slices at a time, STEPS times, V neighbours to a thread.
# Codes along rows alone need no block of rows: few rows and many slices fill whole sectors.
_ALONG_ROWS: dict[str, Any] = {"B": 4, "BS": 32, "STEPS": 4, "V": 16, "num_warps": 4}
# Two warps of threads that each own two columns: no thread waits for one of another warp.
_DOWN_COLUMNS: dict[str, Any] = {"B": 32, "BS": 4, "STEPS": 1, "V": 2, "num_warps": 2}
_COLUMN_VALUES: dict[str, Any] = {"B": 32, "BS": 8, "STEPS": 1, "V": 4, "num_warps": 4}

Buffers = tuple[Tensor, Tensor]


@triton.jit
def _exponent(amax):
    """The byte of the smallest power of two that brings ``amax``, not NaN, to 448 or below."""
    bits = (amax * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    # Rounded up if any bit of the mantissa is set; infinity and what follows 254 become 254.
    exponent = tl.minimum((bits + 0x7FFFFF) >> 23, 254)
    # Code 0 means 2^-127, which covers subnormals up to half the smallest normal.
    return tl.where(bits <= 0x400000, 0, exponent)


@triton.jit
def _multiplier(exponent):
    """``1 / 2^(exponent - 127)``, for exponents up to 254."""
    bits = tl.where(exponent == 254, 0x00400000, (254 - exponent) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _factor(exponent):
    """``2^(exponent - 127)``; 255 is NaN."""
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
    bits = tl.where(exponent == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _quantize_kernel(
    p_x,
    p_row_codes,
    p_row_exponents,
    p_column_codes,
    p_column_exponents,
    p_tile_codes,
    p_tile_exponents,
    p_table,
    groups,
    rows,
    columns,
    row_stride,
    B: tl.constexpr,
    BS: tl.constexpr,
    STEPS: tl.constexpr,
    V: tl.constexpr,
    OFFSET: tl.constexpr,
):
    slices = tl.cdiv(columns, 32)
    chunks = tl.cdiv(slices, BS * STEPS)
    i_block = tl.program_id(0) // chunks
    i_chunk = tl.program_id(0) % chunks
    first, end, group = locate_block(p_table, rows, i_block, B)
    # A block that no group needs reads nothing, and so has exponents of zero.
    end = tl.where(group < groups, end, first)
    o_first, o_block = tl.cast(first, tl.int64), tl.cast(i_block, tl.int64)
    p_x += o_first * row_stride
    i_row = tl.arange(0, B)
    m_row = first + i_row < end
    o_row = i_row.to(OFFSET)
    for i_step in range(STEPS):
        i_slice = (i_chunk * STEPS + i_step) * BS + tl.arange(0, BS)
        # The maximum with a NaN is the other operand: a NaN does not count.
        if p_row_codes is not None:
            i_column = i_slice[:, None] * 32 + tl.arange(0, 32)[None, :]
            mask = m_row[:, None, None] & (i_column < columns)[None, :, :]
            o_tile = o_row[:, None, None] * row_stride + i_column[None, :, :]
            x = tl.load(p_x + o_tile, mask=mask, other=0).to(tl.float32)
            o_codes = o_row[:, None, None] * columns + i_column[None, :, :]
            exponent = _exponent(tl.maximum(tl.max(tl.abs(x), 2), 0.0))
            codes = (x * _multiplier(exponent)[:, :, None]).to(tl.float8e4nv)
            tl.store(p_row_codes + o_first * columns + o_codes, codes, mask=mask)
            o_exponents = o_row[:, None] * slices + i_slice[None, :]
            p_exponents = p_row_exponents + o_first * slices + o_exponents
            m_exponents = m_row[:, None] & (i_slice < slices)[None, :]
            tl.store(p_exponents, exponent.to(tl.uint8), mask=m_exponents)
        if p_row_codes is None or p_column_codes is not None:
            # A thread gets whole columns of two neighbours, so that it finds their largest
            # value alone.  Where rows were done first, this load finds the tile in the cache.
            i_pair = tl.max_contiguous(i_slice[:, None] * 32 + tl.arange(0, 32)[None, :], [1, V])
            m_pair = i_pair < columns
            mask = m_row[:, None, None] & m_pair[None, :, :]
            o_tile = o_row[:, None, None] * row_stride + i_pair[None, :, :]
            x = tl.load(p_x + o_tile, mask=mask, other=0).to(tl.float32)
            o_codes = o_row[:, None, None] * columns + i_pair[None, :, :]
            largest = tl.maximum(tl.max(tl.abs(x), 0), 0.0)
            if p_column_codes is not None:
                exponent = _exponent(largest)
                codes = (x * _multiplier(exponent)[None, :, :]).to(tl.float8e4nv)
                tl.store(p_column_codes + o_first * columns + o_codes, codes, mask=mask)
                p_exponents = p_column_exponents + o_block * columns + i_pair
                tl.store(p_exponents, exponent.to(tl.uint8), mask=m_pair)
            else:
                exponent = _exponent(tl.max(largest, 1))
                codes = (x * _multiplier(exponent)[None, :, None]).to(tl.float8e4nv)
                tl.store(p_tile_codes + o_first * columns + o_codes, codes, mask=mask)
                p_exponents = p_tile_exponents + o_block * slices + i_slice
                tl.store(p_exponents, exponent.to(tl.uint8), mask=i_slice < slices)


@triton.jit
def _dequantize_kernel(
    p_codes,
    p_row_exponents,
    p_column_exponents,
    p_tile_exponents,
    p_y,
    p_table,
    groups,
    rows,
    columns,
    row_stride,
    B: tl.constexpr,
    BS: tl.constexpr,
    STEPS: tl.constexpr,
    V: tl.constexpr,
    OFFSET: tl.constexpr,
):
    slices = tl.cdiv(columns, 32)
    chunks = tl.cdiv(slices, BS * STEPS)
    i_block = tl.program_id(0) // chunks
    i_chunk = tl.program_id(0) % chunks
    first, end, group = locate_block(p_table, rows, i_block, B)
    o_first, o_block = tl.cast(first, tl.int64), tl.cast(i_block, tl.int64)
    p_codes += o_first * row_stride
    p_y += o_first * columns
    i_row = tl.arange(0, B)
    m_row = first + i_row < end
    # The tail is written, as zeros, and never read.
    m_read = first + i_row < tl.where(group < groups, end, first)
    o_row = i_row.to(OFFSET)
    for i_step in range(STEPS):
        i_slice = (i_chunk * STEPS + i_step) * BS + tl.arange(0, BS)
        i_column = i_slice[:, None] * 32 + tl.arange(0, 32)[None, :]
        i_column = tl.max_contiguous(i_column, [1, V])
        m_slice = i_slice < slices
        m_column = i_column < columns
        if p_row_exponents is not None:
            o_exponent = o_row[:, None] * slices + i_slice[None, :]
            p_exponent = p_row_exponents + o_first * slices + o_exponent
            m_exponent = m_read[:, None] & m_slice[None, :]
            exponent = tl.load(p_exponent, mask=m_exponent, other=0).to(tl.int32)
            factor = _factor(exponent)[:, :, None]
        elif p_column_exponents is not None:
            p_exponent = p_column_exponents + o_block * columns + i_column
            exponent = tl.load(p_exponent, mask=m_column, other=0).to(tl.int32)
            factor = _factor(exponent)[None, :, :]
        else:
            p_exponent = p_tile_exponents + o_block * slices + i_slice
            exponent = tl.load(p_exponent, mask=m_slice, other=0).to(tl.int32)
            factor = _factor(exponent)[None, :, None]
        mask = m_read[:, None, None] & m_column[None, :, :]
        p_tile = p_codes + (o_row[:, None, None] * row_stride + i_column[None, :, :])
        y = tl.load(p_tile, mask=mask, other=0.0).to(tl.float32)
        y = tl.where(mask, y * factor, 0.0)
        mask = m_row[:, None, None] & m_column[None, :, :]
        p_tile = p_y + (o_row[:, None, None] * columns + i_column[None, :, :])
        tl.store(p_tile, y.to(p_y.dtype.element_ty), mask=mask)


def quantize_mx_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP8 along rows: codes ``(M, K)`` and exponents ``(M, ceil(K/32))``, both bytes."""
    buffers = _row_buffers(x_MK)
    _quantize(x_MK, None, along_rows=buffers)
    return buffers


def quantize_mx_columns(x_MK: Tensor, ends_G: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """MXFP8 down columns: codes ``(M, K)`` in logical order and exponents ``(S, K)``, bytes."""
    buffers = _block_buffers(x_MK, ends_G, x_MK.shape[1])
    _quantize(x_MK, ends_G, down_columns=buffers)
    return buffers


def quantize_mx_both(
    x_MK: Tensor, ends_G: Tensor | None = None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Both of the above from one read of ``x_MK``; rows past the last group are unspecified."""
    along_rows = _row_buffers(x_MK)
    down_columns = _block_buffers(x_MK, ends_G, x_MK.shape[1])
    _quantize(x_MK, ends_G, along_rows=along_rows, down_columns=down_columns)
    return along_rows, down_columns


def quantize_mx_tiles(x_MK: Tensor, ends_G: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """MXFP8 in tiles of 32 by 32: codes ``(M, K)`` and exponents ``(S, ceil(K/32))``, bytes."""
    buffers = _block_buffers(x_MK, ends_G, triton.cdiv(x_MK.shape[1], _BLOCK))
    _quantize(x_MK, ends_G, in_tiles=buffers)
    return buffers


def dequantize_mx_rows(codes_MK: Tensor, exponent_MC: Tensor, dtype: torch.dtype) -> Tensor:
    """Values ``(M, K)`` of :func:`quantize_mx_rows`."""
    return _dequantize(codes_MK, dtype, None, along_rows=exponent_MC)


def dequantize_mx_columns(
    codes_MK: Tensor, exponent_SK: Tensor, dtype: torch.dtype, ends_G: Tensor | None = None
) -> Tensor:
    """Values ``(M, K)`` of :func:`quantize_mx_columns`; rows past the last group are zero."""
    return _dequantize(codes_MK, dtype, ends_G, down_columns=exponent_SK)


def dequantize_mx_tiles(
    codes_MK: Tensor, exponent_SC: Tensor, dtype: torch.dtype, ends_G: Tensor | None = None
) -> Tensor:
    """Values ``(M, K)`` of :func:`quantize_mx_tiles`; rows past the last group are zero."""
    return _dequantize(codes_MK, dtype, ends_G, in_tiles=exponent_SC)


def _row_buffers(x_MK: Tensor) -> Buffers:
    rows, columns = x_MK.shape
    slices = triton.cdiv(columns, _BLOCK)
    return new_bytes(rows, columns, x_MK), new_bytes(rows, slices, x_MK)


def _block_buffers(x_MK: Tensor, ends_G: Tensor | None, exponent_columns: int) -> Buffers:
    blocks = block_count(len(x_MK), ends_G, _BLOCK)
    return new_bytes(*x_MK.shape, like=x_MK), new_bytes(blocks, exponent_columns, x_MK)


def _quantize(
    x_MK: Tensor,
    ends_G: Tensor | None,
    *,
    along_rows: Buffers | None = None,
    down_columns: Buffers | None = None,
    in_tiles: Buffers | None = None,
) -> None:
    x_MK = unit_columns(x_MK)
    rows, columns = x_MK.shape
    only_rows = down_columns is None and in_tiles is None
    tile, programs = _launch(_ALONG_ROWS if only_rows else _DOWN_COLUMNS, x_MK, ends_G)
    if not programs:
        return
    row_codes, row_exponents = _as_codes(along_rows)
    column_codes, column_exponents = _as_codes(down_columns)
    tile_codes, tile_exponents = _as_codes(in_tiles)
    _quantize_kernel[(programs,)](
        x_MK,
        row_codes,
        row_exponents,
        column_codes,
        column_exponents,
        tile_codes,
        tile_exponents,
        block_table(ends_G, rows, _BLOCK),
        group_number(ends_G),
        rows,
        columns,
        x_MK.stride(0),
        **tile,
    )


def _dequantize(
    codes_MK: Tensor,
    dtype: torch.dtype,
    ends_G: Tensor | None,
    *,
    along_rows: Tensor | None = None,
    down_columns: Tensor | None = None,
    in_tiles: Tensor | None = None,
) -> Tensor:
    codes_MK = unit_columns(codes_MK)
    rows, columns = codes_MK.shape
    y_MK = torch.empty(rows, columns, dtype=dtype, device=codes_MK.device)
    kind = _COLUMN_VALUES if along_rows is None else _ALONG_ROWS
    tile, programs = _launch(kind, codes_MK, ends_G)
    if programs:
        _dequantize_kernel[(programs,)](
            codes_MK.view(torch.float8_e4m3fn),
            None if along_rows is None else along_rows.contiguous(),
            None if down_columns is None else down_columns.contiguous(),
            None if in_tiles is None else in_tiles.contiguous(),
            y_MK,
            block_table(ends_G, rows, _BLOCK),
            group_number(ends_G),
            rows,
            columns,
            codes_MK.stride(0),
            **tile,
        )
    return y_MK


def _launch(
    kind: dict[str, Any], x_MK: Tensor, ends_G: Tensor | None
) -> tuple[dict[str, Any], int]:
    """The constants of a launch, and how many programs it has."""
    rows, columns = x_MK.shape
    slices = triton.cdiv(columns, _BLOCK)
    BS = min(kind["BS"], triton.next_power_of_2(max(1, slices)))
    steps = min(kind["STEPS"], max(1, triton.cdiv(slices, BS)))
    programs = block_count(rows, ends_G, kind["B"]) * triton.cdiv(slices, BS * steps)
    # The first row of a program is addressed in 64 bits; its others, from there, in fewer.
    farthest = kind["B"] * max(x_MK.stride(0), columns) + columns
    offset = tl.int32 if farthest < 2**31 else tl.int64
    return kind | {"BS": BS, "STEPS": steps, "OFFSET": offset}, programs


def _as_codes(pair: Buffers | None) -> tuple[Tensor | None, Tensor | None]:
    if pair is None:
        return None, None
    codes, exponents = pair
    return codes.view(torch.float8_e4m3fn), exponents
