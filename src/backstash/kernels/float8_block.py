"""Float8 in blocks of 128 on a GPU: the twins of ``backstash.kernels.reference.float8_block``.

A block along a row is a line of a tile.  For blocks down columns, and tiles, a program owns
128 rows of some columns: it goes over them once for their largest values and once more, now
from the cache, to cast them.

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
from backstash.kernels.cast.scaled import kept_bits, scale_of
from backstash.kernels.reference.cast import FLOAT32_MAX

_BLOCK = 128
_ROWS, _ROW_BLOCKS = 4, 8
_STEP = 32


@triton.jit
def _quantize_rows_kernel(
    p_x,
    p_codes,
    p_scale_inv,
    rows,
    columns,
    row_stride,
    largest,
    epsilon,
    value_for_inf,
    kept,
    B: tl.constexpr,
    BC: tl.constexpr,
):
    blocks = tl.cdiv(columns, 128)
    chunks = tl.cdiv(blocks, BC)
    i_row = (tl.program_id(0) // chunks).to(tl.int64) * B + tl.arange(0, B)
    i_block = (tl.program_id(0) % chunks) * BC + tl.arange(0, BC)
    i_column = i_block[:, None] * 128 + tl.arange(0, 128)[None, :]
    mask = (i_row < rows)[:, None, None] & (i_column < columns)[None, :, :]
    p_tile = p_x + i_row[:, None, None] * row_stride + i_column[None, :, :]
    x = tl.load(p_tile, mask=mask, other=0).to(tl.float32)
    # The maximum with a NaN is the other operand: a NaN does not count.
    amax = tl.maximum(tl.max(tl.abs(x), 2), 0.0)
    scale = scale_of(amax, largest, epsilon, value_for_inf, kept)
    codes = (x * scale[:, :, None]).to(p_codes.dtype.element_ty)
    tl.store(p_codes + i_row[:, None, None] * columns + i_column[None, :, :], codes, mask=mask)
    p_block = p_scale_inv + i_row[:, None] * blocks + i_block[None, :]
    m_block = (i_row < rows)[:, None] & (i_block < blocks)[None, :]
    tl.store(p_block, tl.div_rn(tl.full([B, BC], 1, tl.float32), scale), mask=m_block)


@triton.jit
def _quantize_blocks_kernel(
    p_x,
    p_codes,
    p_column_scale_inv,
    p_tile_scale_inv,
    p_table,
    groups,
    rows,
    columns,
    row_stride,
    largest,
    epsilon,
    value_for_inf,
    kept,
    B: tl.constexpr,
    BR: tl.constexpr,
):
    chunks = tl.cdiv(columns, 128)
    i_block = tl.program_id(0) // chunks
    i_chunk = tl.program_id(0) % chunks
    i_column = i_chunk * 128 + tl.arange(0, 128)
    m_column = i_column < columns
    first, end, group = locate_block(p_table, rows, i_block, B)
    # A block that no group needs reads nothing; its scales are written as zeros.
    end = tl.where(group < groups, end, first)
    magnitude = tl.zeros([BR, 128], tl.float32)
    for i in range(0, B, BR):
        i_row = first + i + tl.arange(0, BR)
        mask = (i_row < end)[:, None] & m_column[None, :]
        p_tile = p_x + i_row.to(tl.int64)[:, None] * row_stride + i_column[None, :]
        x = tl.load(p_tile, mask=mask, other=0).to(tl.float32)
        magnitude = tl.maximum(magnitude, tl.abs(x))
    amax = tl.max(magnitude, 0)
    if p_tile_scale_inv is not None:
        amax = tl.zeros([128], tl.float32) + tl.max(amax, 0)
    scale = scale_of(amax, largest, epsilon, value_for_inf, kept)
    inverse = tl.div_rn(tl.full([128], 1, tl.float32), scale)
    inverse = tl.where(group < groups, inverse, 0.0)
    o_block = tl.cast(i_block, tl.int64)
    if p_tile_scale_inv is not None:
        tl.store(p_tile_scale_inv + o_block * chunks + i_chunk, tl.max(inverse, 0))
    else:
        tl.store(p_column_scale_inv + o_block * columns + i_column, inverse, mask=m_column)
    for i in range(0, B, BR):
        i_row = first + i + tl.arange(0, BR)
        mask = (i_row < end)[:, None] & m_column[None, :]
        o_row = i_row.to(tl.int64)[:, None]
        p_tile = p_x + o_row * row_stride + i_column[None, :]
        x = tl.load(p_tile, mask=mask, other=0).to(tl.float32)
        codes = (x * scale[None, :]).to(p_codes.dtype.element_ty)
        tl.store(p_codes + o_row * columns + i_column[None, :], codes, mask=mask)


@triton.jit
def _dequantize_kernel(
    p_codes,
    p_row_scale_inv,
    p_column_scale_inv,
    p_tile_scale_inv,
    p_y,
    p_table,
    groups,
    rows,
    columns,
    row_stride,
    B: tl.constexpr,
    BR: tl.constexpr,
):
    chunks = tl.cdiv(columns, 128)
    i_block = tl.program_id(0) // chunks
    i_chunk = tl.program_id(0) % chunks
    i_column = i_chunk * 128 + tl.arange(0, 128)
    m_column = i_column < columns
    first, end, group = locate_block(p_table, rows, i_block, B)
    # The tail is written, as zeros, and never read.
    read_end = tl.where(group < groups, end, first)
    o_block = tl.cast(i_block, tl.int64)
    factor = tl.zeros([1, 128], tl.float32)
    if p_column_scale_inv is not None:
        p_block = p_column_scale_inv + o_block * columns + i_column
        factor = tl.load(p_block, mask=m_column, other=0)[None, :]
    elif p_tile_scale_inv is not None:
        factor += tl.load(p_tile_scale_inv + o_block * chunks + i_chunk)
    for i in range(0, B, BR):
        i_row = first + i + tl.arange(0, BR)
        o_row = i_row.to(tl.int64)
        mask = (i_row < read_end)[:, None] & m_column[None, :]
        p_tile = p_codes + o_row[:, None] * row_stride + i_column[None, :]
        y = tl.load(p_tile, mask=mask, other=0.0).to(tl.float32)
        if p_row_scale_inv is not None:
            p_row = p_row_scale_inv + o_row * chunks + i_chunk
            y *= tl.load(p_row, mask=i_row < read_end, other=0)[:, None]
        else:
            y *= factor
        p_tile = p_y + o_row[:, None] * columns + i_column[None, :]
        y = tl.where(mask, y, 0.0).to(p_y.dtype.element_ty)
        tl.store(p_tile, y, mask=(i_row < end)[:, None] & m_column[None, :])


def quantize_block_rows(
    x_MK: Tensor, code_dtype: torch.dtype, *, epsilon: float = 0.0, power_of_two: bool = True
) -> tuple[Tensor, Tensor]:
    """Blocks along rows: codes ``(M, K)`` as bytes and inverse scales ``(M, C)``."""
    x_MK = unit_columns(x_MK)
    rows, columns = x_MK.shape
    blocks = triton.cdiv(columns, _BLOCK)
    codes_MK = new_bytes(rows, columns, like=x_MK)
    scale_inv_MC = torch.empty(rows, blocks, dtype=torch.float32, device=x_MK.device)
    BC = min(_ROW_BLOCKS, triton.next_power_of_2(max(1, blocks)))
    tile: dict[str, Any] = {"B": _ROWS, "BC": BC}
    programs = triton.cdiv(rows, _ROWS) * triton.cdiv(blocks, BC)
    if programs:
        _quantize_rows_kernel[(programs,)](
            x_MK,
            codes_MK.view(code_dtype),
            scale_inv_MC,
            rows,
            columns,
            x_MK.stride(0),
            *_scaling(x_MK, code_dtype, epsilon, power_of_two=power_of_two),
            **tile,
        )
    return codes_MK, scale_inv_MC


def quantize_block_columns(
    x_MK: Tensor,
    code_dtype: torch.dtype,
    ends_G: Tensor | None = None,
    *,
    epsilon: float = 0.0,
    power_of_two: bool = True,
) -> tuple[Tensor, Tensor]:
    """Blocks down columns: codes ``(M, K)`` as bytes and inverse scales ``(S, K)``."""
    blocks = block_count(len(x_MK), ends_G, _BLOCK)
    scale_inv_SK = torch.empty(blocks, x_MK.shape[1], dtype=torch.float32, device=x_MK.device)
    scaling = _scaling(x_MK, code_dtype, epsilon, power_of_two=power_of_two)
    return _quantize_blocks(x_MK, code_dtype, ends_G, (scale_inv_SK, None), scaling), scale_inv_SK


def quantize_block_tiles(
    x_MK: Tensor,
    code_dtype: torch.dtype,
    ends_G: Tensor | None = None,
    *,
    epsilon: float = 0.0,
    power_of_two: bool = True,
) -> tuple[Tensor, Tensor]:
    """Tiles: codes ``(M, K)`` as bytes and inverse scales ``(S, C)``."""
    shape = block_count(len(x_MK), ends_G, _BLOCK), triton.cdiv(x_MK.shape[1], _BLOCK)
    scale_inv_SC = torch.empty(shape, dtype=torch.float32, device=x_MK.device)
    scaling = _scaling(x_MK, code_dtype, epsilon, power_of_two=power_of_two)
    return _quantize_blocks(x_MK, code_dtype, ends_G, (None, scale_inv_SC), scaling), scale_inv_SC


def dequantize_block_rows(
    codes_MK: Tensor, scale_inv_MC: Tensor, code_dtype: torch.dtype, dtype: torch.dtype
) -> Tensor:
    """Values ``(M, K)`` of :func:`quantize_block_rows`."""
    return _dequantize(codes_MK.view(code_dtype), (scale_inv_MC, None, None), dtype, None)


def dequantize_block_columns(
    codes_MK: Tensor,
    scale_inv_SK: Tensor,
    code_dtype: torch.dtype,
    dtype: torch.dtype,
    ends_G: Tensor | None = None,
) -> Tensor:
    """Values ``(M, K)`` of :func:`quantize_block_columns`; rows past the last group are zero."""
    return _dequantize(codes_MK.view(code_dtype), (None, scale_inv_SK, None), dtype, ends_G)


def dequantize_block_tiles(
    codes_MK: Tensor,
    scale_inv_SC: Tensor,
    code_dtype: torch.dtype,
    dtype: torch.dtype,
    ends_G: Tensor | None = None,
) -> Tensor:
    """Values ``(M, K)`` of :func:`quantize_block_tiles`; rows past the last group are zero."""
    return _dequantize(codes_MK.view(code_dtype), (None, None, scale_inv_SC), dtype, ends_G)


def _scaling(
    x_MK: Tensor, code_dtype: torch.dtype, epsilon: float, *, power_of_two: bool
) -> tuple[float, float, float, int]:
    """What a kernel needs to make a scale; one too large is the largest of the input's dtype."""
    value_for_inf = min(torch.finfo(x_MK.dtype).max, FLOAT32_MAX)
    kept = kept_bits(power_of_two=power_of_two)
    return torch.finfo(code_dtype).max, float(epsilon), value_for_inf, kept


def _quantize_blocks(
    x_MK: Tensor,
    code_dtype: torch.dtype,
    ends_G: Tensor | None,
    scales_inv: tuple[Tensor | None, Tensor | None],
    scaling: tuple[float, float, float, int],
) -> Tensor:
    x_MK = unit_columns(x_MK)
    rows, columns = x_MK.shape
    codes_MK = new_bytes(rows, columns, like=x_MK)
    tile: dict[str, Any] = {"B": _BLOCK, "BR": _STEP}
    programs = block_count(rows, ends_G, _BLOCK) * triton.cdiv(columns, _BLOCK)
    if programs:
        _quantize_blocks_kernel[(programs,)](
            x_MK,
            codes_MK.view(code_dtype),
            *scales_inv,
            block_table(ends_G, rows, _BLOCK),
            group_number(ends_G),
            rows,
            columns,
            x_MK.stride(0),
            *scaling,
            **tile,
        )
    return codes_MK


def _dequantize(
    codes_MK: Tensor,
    scales_inv: tuple[Tensor | None, Tensor | None, Tensor | None],
    dtype: torch.dtype,
    ends_G: Tensor | None,
) -> Tensor:
    codes_MK = unit_columns(codes_MK)
    rows, columns = codes_MK.shape
    y_MK = torch.empty(rows, columns, dtype=dtype, device=codes_MK.device)
    along_rows, down_columns, in_tiles = scales_inv
    tile: dict[str, Any] = {"B": _BLOCK, "BR": _STEP}
    programs = block_count(rows, ends_G, _BLOCK) * triton.cdiv(columns, _BLOCK)
    if programs:
        _dequantize_kernel[(programs,)](
            codes_MK,
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
