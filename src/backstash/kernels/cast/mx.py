"""MXFP8 on a GPU: blocks of 32 with a power of two, along rows, down columns, or in tiles.

The tile that a program reads has three dimensions, rows, slices and the 32 columns of a slice,
so a block along a row is a line of the last dimension and a block down a column a line of the
first.  Each direction has its own best tile; where both are wanted, programs of the two take
turns over the same rows, which then come from memory once and from the cache after that.

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

_BLOCK = 32
# Codes along rows need no block of rows: few rows and many slices fill whole sectors.
_ROWS, _ROWS_BESIDE_COLUMNS, _ROW_SLICES, _ROW_STEPS = 4, 2, 32, 4
# Down columns, programs of two warps: few threads that wait for one another.
_COLUMN_SLICES, _COLUMNS_A_THREAD, _VALUE_SLICES, _VALUES_A_THREAD = 2, 2, 4, 4

Buffers = tuple[Tensor, Tensor]


@triton.jit
def _along_rows(
    p_x,
    p_codes,
    p_exponents,
    rows,
    columns,
    row_stride,
    i_program,
    B: tl.constexpr,
    BS: tl.constexpr,
    STEPS: tl.constexpr,
    OFFSET: tl.constexpr,
):
    slices = tl.cdiv(columns, 32)
    chunks = tl.cdiv(slices, BS * STEPS)
    first = tl.cast(i_program // chunks, tl.int64) * B
    p_x += first * row_stride
    p_codes += first * columns
    p_exponents += first * slices
    i_row = tl.arange(0, B)
    m_row = first + i_row < rows
    o_row = i_row.to(OFFSET)
    for i_step in range(STEPS):
        i_slice = (i_program % chunks * STEPS + i_step) * BS + tl.arange(0, BS)
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
def _down_columns(
    p_x,
    p_codes,
    p_exponents,
    p_tile_exponents,
    p_table,
    groups,
    rows,
    columns,
    row_stride,
    i_program,
    B: tl.constexpr,
    BS: tl.constexpr,
    V: tl.constexpr,
    OFFSET: tl.constexpr,
):
    slices = tl.cdiv(columns, 32)
    chunks = tl.cdiv(slices, BS)
    i_block = i_program // chunks
    first, end, group = locate_block(p_table, rows, i_block, B)
    i_slice = i_program % chunks * BS + tl.arange(0, BS)
    # A thread gets V columns side by side: it finds their largest values almost alone.
    i_column = tl.max_contiguous(i_slice[:, None] * 32 + tl.arange(0, 32)[None, :], [1, V])
    m_column = i_column < columns
    exponent = tl.zeros([BS, 32], tl.int32)
    tile_exponent = tl.zeros([BS], tl.int32)
    # A block that no group needs has exponents of zero, and nothing else.
    if group < groups:
        o_first = tl.cast(first, tl.int64)
        i_row = tl.arange(0, B)
        o_row = i_row.to(OFFSET)
        mask = (first + i_row < end)[:, None, None] & m_column[None, :, :]
        o_tile = o_row[:, None, None] * row_stride + i_column[None, :, :]
        x = tl.load(p_x + o_first * row_stride + o_tile, mask=mask, other=0).to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(x), 0), 0.0)
        if p_exponents is not None:
            exponent = exponent_of(largest)
            codes = x * multiplier_of(exponent)[None, :, :]
        else:
            tile_exponent = exponent_of(tl.max(largest, 1))
            codes = x * multiplier_of(tile_exponent)[None, :, None]
        o_codes = o_row[:, None, None] * columns + i_column[None, :, :]
        tl.store(p_codes + o_first * columns + o_codes, codes.to(tl.float8e4nv), mask=mask)
    if p_exponents is not None:
        p_exponent = p_exponents + tl.cast(i_block, tl.int64) * columns + i_column
        tl.store(p_exponent, exponent.to(tl.uint8), mask=m_column)
    else:
        p_exponent = p_tile_exponents + tl.cast(i_block, tl.int64) * slices + i_slice
        tl.store(p_exponent, tile_exponent.to(tl.uint8), mask=i_slice < slices)


@triton.jit
def _quantize_kernel(
    p_x,
    p_row_codes,
    p_row_exponents,
    p_codes,
    p_column_exponents,
    p_tile_exponents,
    p_table,
    groups,
    rows,
    columns,
    row_stride,
    column_programs,
    RB: tl.constexpr,
    RBS: tl.constexpr,
    STEPS: tl.constexpr,
    B: tl.constexpr,
    BS: tl.constexpr,
    V: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Codes along rows, or down columns or in tiles; or both, in programs that take turns.

    Programs side by side work on the same rows at the same time, so what one has read the
    other finds in the cache, and each direction keeps the threads as suits it.
    """
    i_program = tl.program_id(0)
    if p_codes is None:
        _along_rows(
            p_x, p_row_codes, p_row_exponents, rows, columns, row_stride,
            i_program, RB, RBS, STEPS, OFFSET,
        )  # fmt: skip
    elif p_row_codes is None:
        _down_columns(
            p_x, p_codes, p_column_exponents, p_tile_exponents, p_table, groups, rows, columns,
            row_stride, i_program, B, BS, V, OFFSET,
        )  # fmt: skip
    else:
        i_program = i_program // 2
        if tl.program_id(0) % 2 == 0:
            _along_rows(
                p_x, p_row_codes, p_row_exponents, rows, columns, row_stride,
                i_program, RB, RBS, STEPS, OFFSET,
            )  # fmt: skip
        elif i_program < column_programs:
            _down_columns(
                p_x, p_codes, p_column_exponents, p_tile_exponents, p_table, groups, rows,
                columns, row_stride, i_program, B, BS, V, OFFSET,
            )  # fmt: skip


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
            factor = factor_of(exponent)[:, :, None]
        elif p_column_exponents is not None:
            p_exponent = p_column_exponents + o_block * columns + i_column
            exponent = tl.load(p_exponent, mask=m_column, other=0).to(tl.int32)
            factor = factor_of(exponent)[None, :, :]
        else:
            p_exponent = p_tile_exponents + o_block * slices + i_slice
            exponent = tl.load(p_exponent, mask=m_slice, other=0).to(tl.int32)
            factor = factor_of(exponent)[None, :, None]
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
    slices = triton.cdiv(columns, _BLOCK)
    row_codes, row_exponents = _as_codes(along_rows)
    codes, _ = _as_codes(down_columns or in_tiles)
    BS = min(_COLUMN_SLICES, triton.next_power_of_2(max(1, slices)))
    tile = _row_tile(slices, steps=_ROW_STEPS if codes is None else 1)
    if codes is not None:
        tile |= {"RB": _ROWS_BESIDE_COLUMNS, "num_warps": 2}
    tile |= {"B": _BLOCK, "BS": BS, "V": _COLUMNS_A_THREAD, "OFFSET": _offset(x_MK)}
    row_programs = triton.cdiv(rows, tile["RB"]) * triton.cdiv(slices, tile["RBS"] * tile["STEPS"])
    column_programs = block_count(rows, ends_G, _BLOCK) * triton.cdiv(slices, BS)
    programs = row_programs if codes is None else column_programs
    if row_codes is not None and codes is not None:
        programs = 2 * max(row_programs, column_programs)
    if not programs:
        return
    _quantize_kernel[(programs,)](
        x_MK,
        row_codes,
        row_exponents,
        codes,
        None if down_columns is None else down_columns[1],
        None if in_tiles is None else in_tiles[1],
        None if codes is None else block_table(ends_G, rows, _BLOCK),
        group_number(ends_G),
        rows,
        columns,
        x_MK.stride(0),
        column_programs,
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
    slices = triton.cdiv(columns, _BLOCK)
    y_MK = torch.empty(rows, columns, dtype=dtype, device=codes_MK.device)
    tile: dict[str, Any]
    if along_rows is not None:
        row_tile = _row_tile(slices, steps=_ROW_STEPS)
        tile = {"B": row_tile["RB"], "BS": row_tile["RBS"], "STEPS": row_tile["STEPS"], "V": 16}
    else:
        BS = min(_VALUE_SLICES, triton.next_power_of_2(max(1, slices)))
        tile = {"B": _BLOCK, "BS": BS, "STEPS": 1, "V": _VALUES_A_THREAD, "num_warps": 2}
    chunks = triton.cdiv(slices, tile["BS"] * tile["STEPS"])
    programs = block_count(rows, ends_G, tile["B"]) * chunks
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
            OFFSET=_offset(codes_MK),
        )
    return y_MK


def _row_tile(slices: int, *, steps: int) -> dict[str, Any]:
    """Rows, slices and steps of a program along rows."""
    RBS = min(_ROW_SLICES, triton.next_power_of_2(max(1, slices)))
    return {"RB": _ROWS, "RBS": RBS, "STEPS": min(steps, max(1, triton.cdiv(slices, RBS)))}


def _offset(x_MK: Tensor) -> Any:
    """The first row of a program is addressed in 64 bits; its others, from there, in fewer."""
    farthest = (_BLOCK + 1) * max(x_MK.stride(0), x_MK.shape[1])
    return tl.int32 if farthest < 2**31 else tl.int64


def _as_codes(pair: Buffers | None) -> tuple[Tensor | None, Tensor | None]:
    if pair is None:
        return None, None
    return pair[0].view(torch.float8_e4m3fn), pair[1]
