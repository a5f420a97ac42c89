"""Float8 in blocks of 128 on a GPU: the twins of ``backstash.kernels.reference.float8_block``.

A block along a row is a line.  For blocks down columns, and tiles, a program has 128 rows of
some columns in its registers: it finds their largest values and casts what it has, so that
every value is read once.

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
from backstash.kernels.cast.lines import quantize_lines
from backstash.kernels.cast.scales import Scaling, scale_of, scaling_of
from backstash.kernels.float8_block_pairs import are_pairs, quantize_pairs
from backstash.kernels.launches import Launcher
from backstash.kernels.reference.cast import FLOAT32_MAX
from backstash.kernels.reference.into import Into, noop_of
from backstash.kernels.sizes import ceil_div

_BLOCK = 128
# Columns of a program, columns of a thread side by side, warps.
_COLUMNS, _TILE = (64, 8, 2), (128, 16, 4)
# Rows of a block, and of a step of a program that makes values.
_VALUES_TILE: dict[str, Any] = {"B": _BLOCK, "BR": 32, "num_warps": 8}


@triton.jit
def _quantize_blocks_kernel(
    p_x,
    p_row_codes,
    p_row_scale_inv,
    p_codes,
    p_column_scale_inv,
    p_tile_scale_inv,
    p_table,
    p_noop,
    groups,
    rows,
    columns,
    row_stride,
    largest,
    epsilon,
    value_for_inf,
    exact,
    B: tl.constexpr,
    BK: tl.constexpr,
    V: tl.constexpr,
):
    """Codes down columns or in tiles; and, with a place for them, those along rows of 128."""
    if p_noop is not None and tl.load(p_noop) != 0:
        return
    chunks = tl.cdiv(columns, BK)
    i_block = tl.program_id(0) // chunks
    i_chunk = tl.program_id(0) % chunks
    # A thread gets V columns side by side, and many rows of each.
    i_column = tl.max_contiguous(i_chunk * BK + tl.arange(0, BK), V)
    m_column = i_column < columns
    first, end, group = locate_block(p_table, rows, i_block, B)
    # A tile has one scale, a line down a column has its own.
    SCALES: tl.constexpr = BK if p_tile_scale_inv is None else 1  # pyright: ignore
    inverse = tl.zeros([SCALES], tl.float32)
    # A block that no group needs reads nothing; its scales are written as zeros.
    if group < groups:
        # A row past the end is the last row once more: it changes no maximum, and no byte.
        i_row = tl.minimum(first + tl.arange(0, B), end - 1).to(tl.int64)
        p_tile = p_x + (i_row * row_stride)[:, None] + i_column[None, :]
        x = tl.load(p_tile, mask=m_column[None, :], other=0).to(tl.float32)
        magnitude = tl.abs(x)
        # The maximum with a NaN is the other operand: a NaN does not count.
        amax = tl.maximum(tl.max(magnitude, 0), 0.0)
        if p_tile_scale_inv is not None:
            amax = tl.max(amax, 0, keep_dims=True)
        scale, inverse = scale_of(amax, largest, epsilon, value_for_inf, exact)
        o_tile = (i_row * columns)[:, None] + i_column[None, :]
        codes = (x * scale[None, :]).to(p_codes.dtype.element_ty)
        tl.store(p_codes + o_tile, codes, mask=m_column[None, :])
        if p_row_codes is not None:
            amax = tl.maximum(tl.max(magnitude, 1), 0.0)
            row_scale, row_inverse = scale_of(amax, largest, epsilon, value_for_inf, exact)
            codes = (x * row_scale[:, None]).to(p_codes.dtype.element_ty)
            tl.store(p_row_codes + o_tile, codes, mask=m_column[None, :])
            p_row = p_row_scale_inv + i_row * chunks + i_chunk
            tl.store(p_row, row_inverse)
    o_block = tl.cast(i_block, tl.int64)
    if p_tile_scale_inv is not None:
        tl.store(p_tile_scale_inv + o_block * chunks + i_chunk + tl.arange(0, 1), inverse)
    else:
        tl.store(p_column_scale_inv + o_block * columns + i_column, inverse, mask=m_column)


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
    # As many neighbours a thread in codes as in values: nothing has to change threads.
    i_column = tl.max_contiguous(i_chunk * 128 + tl.arange(0, 128), 8)
    m_column = i_column < columns
    first, end, group = locate_block(p_table, rows, i_block, B)
    # The tail is written, as zeros, and never read.
    m_read = i_column < tl.where(group < groups, columns, 0)
    o_block = tl.cast(i_block, tl.int64)
    factor = tl.zeros([1, 128], tl.float32)
    if p_column_scale_inv is not None:
        p_block = p_column_scale_inv + o_block * columns + i_column
        factor = tl.load(p_block, mask=m_column, other=0)[None, :]
    elif p_tile_scale_inv is not None:
        factor += tl.load(p_tile_scale_inv + o_block * chunks + i_chunk)
    for i in range(first, end, BR):
        # A row past the end is the last row once more, and the same bytes are written again.
        i_row = tl.minimum(i + tl.arange(0, BR), end - 1).to(tl.int64)
        p_tile = p_codes + (i_row * row_stride)[:, None] + i_column[None, :]
        y = tl.load(p_tile, mask=m_read[None, :], other=0.0).to(tl.float32)
        if p_row_scale_inv is not None:
            y *= tl.load(p_row_scale_inv + i_row * chunks + i_chunk)[:, None]
        else:
            y *= factor
        y = tl.where(m_read[None, :], y, 0.0).to(p_y.dtype.element_ty)
        p_tile = p_y + (i_row * columns)[:, None] + i_column[None, :]
        tl.store(p_tile, y, mask=m_column[None, :])


_write_codes, _write_values = Launcher(_quantize_blocks_kernel), Launcher(_dequantize_kernel)


def quantize_block_rows(
    x_MK: Tensor,
    code_dtype: torch.dtype,
    *,
    epsilon: float = 0.0,
    power_of_two: bool = True,
    into: Into | None = None,
) -> tuple[Tensor, Tensor]:
    """Blocks along rows: codes ``(M, K)`` as bytes and inverse scales ``(M, C)``."""
    shape = len(x_MK), ceil_div(x_MK.shape[1], _BLOCK)
    codes_MK, scale_inv_MC = _buffers(x_MK, shape, into)
    scaling = _scaling(x_MK, code_dtype, epsilon, power_of_two=power_of_two)
    quantize_lines(x_MK, _BLOCK, codes_MK.view(code_dtype), scale_inv_MC, scaling, noop_of(into))
    return codes_MK, scale_inv_MC


def quantize_block_columns(
    x_MK: Tensor,
    code_dtype: torch.dtype,
    ends_G: Tensor | None = None,
    *,
    epsilon: float = 0.0,
    power_of_two: bool = True,
    into: Into | None = None,
) -> tuple[Tensor, Tensor]:
    """Blocks down columns: codes ``(M, K)`` as bytes and inverse scales ``(S, K)``."""
    shape = block_count(len(x_MK), ends_G, _BLOCK), x_MK.shape[1]
    codes_MK, scale_inv_SK = _buffers(x_MK, shape, into)
    scaling = _scaling(x_MK, code_dtype, epsilon, power_of_two=power_of_two)
    outputs = None, None, codes_MK.view(code_dtype), scale_inv_SK, None
    _quantize_blocks(x_MK, outputs, ends_G, scaling, noop_of(into))
    return codes_MK, scale_inv_SK


def quantize_block_both(
    x_MK: Tensor,
    code_dtype: torch.dtype,
    ends_G: Tensor | None = None,
    *,
    epsilon: float = 0.0,
    power_of_two: bool = True,
    into: Into | None = None,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Both of the above from one read of ``x_MK``; rows past the last group are unspecified."""
    if into is None:
        row_shape = len(x_MK), ceil_div(x_MK.shape[1], _BLOCK)
        column_shape = block_count(len(x_MK), ends_G, _BLOCK), x_MK.shape[1]
        four = _buffers(x_MK, row_shape, None) + _buffers(x_MK, column_shape, None)
    else:
        four = into.buffers
    row_codes, row_scale_inv, codes, scale_inv = four
    scaling = _scaling(x_MK, code_dtype, epsilon, power_of_two=power_of_two)
    outputs = row_codes.view(code_dtype), row_scale_inv, codes.view(code_dtype), scale_inv, None
    _quantize_blocks(x_MK, outputs, ends_G, scaling, noop_of(into))
    return (row_codes, row_scale_inv), (codes, scale_inv)


def quantize_block_tiles(
    x_MK: Tensor,
    code_dtype: torch.dtype,
    ends_G: Tensor | None = None,
    *,
    epsilon: float = 0.0,
    power_of_two: bool = True,
    into: Into | None = None,
) -> tuple[Tensor, Tensor]:
    """Tiles: codes ``(M, K)`` as bytes and inverse scales ``(S, C)``."""
    shape = block_count(len(x_MK), ends_G, _BLOCK), ceil_div(x_MK.shape[1], _BLOCK)
    codes_MK, scale_inv_SC = _buffers(x_MK, shape, into)
    scaling = _scaling(x_MK, code_dtype, epsilon, power_of_two=power_of_two)
    outputs = None, None, codes_MK.view(code_dtype), None, scale_inv_SC
    _quantize_blocks(x_MK, outputs, ends_G, scaling, noop_of(into))
    return codes_MK, scale_inv_SC


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
) -> Scaling:
    """What a kernel needs to make a scale; one too large is the largest of the input's dtype."""
    value_for_inf = min(torch.finfo(x_MK.dtype).max, FLOAT32_MAX)
    return scaling_of(code_dtype, epsilon, power_of_two=power_of_two, value_for_inf=value_for_inf)


def _buffers(x_MK: Tensor, shape: tuple[int, int], into: Into | None) -> tuple[Tensor, ...]:
    """Codes and inverse scales of this shape, if there are none to fill."""
    if into is not None:
        return into.buffers
    scale_inv = torch.empty(shape, dtype=torch.float32, device=x_MK.device)
    return new_bytes(*x_MK.shape, like=x_MK), scale_inv


def _quantize_blocks(
    x_MK: Tensor,
    outputs: tuple[Tensor | None, ...],
    ends_G: Tensor | None,
    scaling: Scaling,
    noop: Tensor | None,
) -> None:
    """Fill codes and scales along rows, if asked for, and those down columns or in tiles."""
    x_MK = unit_columns(x_MK)
    rows, columns = x_MK.shape
    row_codes, row_scale_inv, codes, column_scale_inv, tile_scale_inv = outputs
    if codes is not None and column_scale_inv is not None and tile_scale_inv is None:
        pairs = row_codes, row_scale_inv, codes, column_scale_inv
        if are_pairs(x_MK, pairs, scaling):
            quantize_pairs(x_MK, pairs, ends_G, scaling, noop)
            return
    # Codes along rows, and a tile's, need all of its columns in one program.
    BK, V, warps = _COLUMNS if row_codes is None and tile_scale_inv is None else _TILE
    tile: dict[str, Any] = {"B": _BLOCK, "BK": BK, "V": V, "num_warps": warps}
    programs = block_count(rows, ends_G, _BLOCK) * ceil_div(columns, BK)
    if programs:
        _write_codes(
            programs,
            x_MK,
            row_codes,
            row_scale_inv,
            codes,
            column_scale_inv,
            tile_scale_inv,
            block_table(ends_G, rows, _BLOCK),
            noop,
            group_number(ends_G),
            rows,
            columns,
            x_MK.stride(0),
            *scaling,
            **tile,
        )


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
    programs = block_count(rows, ends_G, _BLOCK) * ceil_div(columns, _BLOCK)
    if programs:
        _write_values(
            programs,
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
            **_VALUES_TILE,
        )
    return y_MK
