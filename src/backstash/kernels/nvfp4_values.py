"""Values of NVFP4 codes on a GPU: twins of what reads in ``backstash.kernels.reference.nvfp4``.

Along rows a thread has whole blocks, eight bytes and sixteen values side by side.  Down columns
it has blocks of neighbouring columns, so that rows of values leave side by side; their bytes
come from threads that read along a column.

Letters: M rows, K columns, G groups, S blocks of rows, C blocks of columns, B rows of a program.
"""

# What is known when a kernel is compiled has a type that this checker takes for Python's.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.blocks import block_table, group_number, locate_block
from backstash.kernels.hadamard import rotate_back
from backstash.kernels.nvfp4 import cast_options, load_row_amax, row_tile
from backstash.kernels.nvfp4_codes import apart, factor_of, together, values_of, values_of_words
from backstash.kernels.nvfp4_columns import column_tile, load_column_amax
from backstash.kernels.nvfp4_pairs import values_of_pairs
from backstash.kernels.nvfp4_places import (
    column_grid,
    column_table,
    column_width,
    load_words,
    locate_blocks,
    of_fours,
    place_of,
    row_multiple,
)

# Rows, blocks of columns, steps and warps of a program: one block a thread, which stores wide
# values.
_ROWS, _ROWS_OF_GROUPS = (4, 32, 1, 4), (16, 8, 1, 4)


@triton.jit(do_not_specialize=["groups", "rows"])
def _rows_kernel(
    p_codes,
    p_row_scales,
    p_tile_scales,
    p_amax,
    p_y,
    p_table,
    groups,
    rows,
    columns,
    width,
    amax_stride,
    B: tl.constexpr,
    BC: tl.constexpr,
    STEPS: tl.constexpr,
    WIDE: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Values of B rows and ``BC * STEPS`` blocks of columns; ``2^WIDE`` values a store."""
    blocks = tl.cdiv(columns, 16)
    chunks = tl.cdiv(blocks, BC * STEPS)
    i_rows, i_chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    first, end, group = locate_block(p_table, rows, i_rows, B)
    if p_table is not None and first >= end:
        return
    o_first = tl.cast(first, tl.int64)
    p_codes += o_first * width
    p_y += o_first * columns
    i_row = tl.arange(0, B * BC) // BC
    m_row = first + i_row < end
    # The tail is written, as zeros, and never read.
    m_read = first + i_row < tl.where(group < groups, end, first)
    o_row = i_row.to(OFFSET)
    amax = load_row_amax(p_amax, first + i_row, m_read, group, groups, amax_stride)
    for i_step in range(STEPS):
        i_block = (i_chunk * STEPS + i_step) * BC + tl.arange(0, B * BC) % BC
        if p_row_scales is not None:
            p_scale = p_row_scales + o_first * blocks + (o_row * blocks + i_block)
        else:
            p_scale = p_tile_scales + tl.cast(i_rows // (16 // B), tl.int64) * blocks + i_block
        scale = tl.load(p_scale, mask=m_read & (i_block < blocks), other=0)
        factor = factor_of(scale.to(tl.float8e4nv, bitcast=True).to(tl.float32), amax)
        i_byte = i_block[:, None] * 8 + tl.arange(0, 8)[None, :]
        mask = m_read[:, None] & (i_byte < width)
        codes = tl.load(p_codes + (o_row[:, None] * width + i_byte), mask=mask, other=0)
        y = values_of(apart(codes.to(tl.int32), 3), tl.where(m_read, factor, 0.0))
        for i in tl.static_range(16 >> WIDE):
            part = ()
            for k in tl.static_range(1 << WIDE):
                part += (y[i * (1 << WIDE) + k],)
            i_column = i_block[:, None] * 16 + i * (1 << WIDE) + tl.arange(0, 1 << WIDE)[None, :]
            mask = m_row[:, None] & (i_column < columns)
            p_part = p_y + (o_row[:, None] * columns + i_column)
            tl.store(p_part, together(part, WIDE).to(p_y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["groups", "rows", "blocks", "width"])
def _columns_kernel(
    p_codes,
    p_scales,
    p_amax,
    p_rotation,
    p_y,
    p_table,
    groups,
    rows,
    columns,
    blocks,
    width,
    size,
    amax_stride,
    NB: tl.constexpr,
    BK: tl.constexpr,
    V: tl.constexpr,
):
    i_first = (tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)) * NB
    if i_first >= blocks:
        return
    if p_table is not None:
        # Blocks that have rows come first.
        has_rows = tl.load(p_table + i_first * 8 + 1) > tl.load(p_table + i_first * 8)
    i_block = i_first + tl.arange(0, NB)
    i_column = tl.max_contiguous(tl.program_id(0) * BK + tl.arange(0, BK), V)
    m_column = i_column < columns
    first, end, group, prefix, width, before = locate_blocks(p_table, rows, width, i_block, blocks)
    if p_table is not None and has_rows == 0:
        return
    # The tail is written, as zeros, and never read.
    m_read = (group < groups) & (i_block < blocks)
    o_scale = i_block.to(tl.int64)[:, None] * columns + i_column[None, :]
    mask = m_read[:, None] & m_column[None, :]
    scale = tl.load(p_scales + o_scale, mask=mask, other=0)
    scale = tl.reshape(scale.to(tl.float8e4nv, bitcast=True).to(tl.float32), [NB * BK])
    amax = load_column_amax(p_amax, group, groups, i_column, columns, amax_stride)
    factor = tl.where(tl.reshape(mask, [NB * BK]), factor_of(scale, amax), 0.0)
    place = place_of(prefix, before, width, i_column, columns)
    words = load_words(p_codes, place, mask, width - before, size)
    if p_rotation is None and p_y.dtype.element_ty == tl.bfloat16:
        y = values_of_pairs(of_fours(words), factor)
    else:
        y = values_of_words(of_fours(words), factor)
    if p_rotation is not None:
        y = rotate_back(y)
    p_tile = p_y + first.to(tl.int64)[:, None] * columns + i_column[None, :]
    for i in tl.static_range(16):
        mask = ((first + i < end) & (i_block < blocks))[:, None] & m_column[None, :]
        row = tl.reshape(y[i], [NB, BK]).to(p_y.dtype.element_ty)
        tl.store(p_tile + i * tl.cast(columns, tl.int64), row, mask=mask)


def dequantize_nvfp4_rows(
    codes: Tensor,
    scales_MC: Tensor,
    amax: Tensor,
    columns: int,
    dtype: torch.dtype,
    ends_G: Tensor | None = None,
) -> Tensor:
    """Values ``(M, columns)`` of ``quantize_nvfp4_rows``; the tail is zero."""
    y_MK = torch.empty(len(codes), columns, dtype=dtype, device=codes.device)
    _dequantize(codes, (scales_MC.contiguous(), None), amax, y_MK, ends_G)
    return y_MK


def dequantize_nvfp4_tiles(
    codes: Tensor,
    scales_SC: Tensor,
    amax: Tensor,
    columns: int,
    dtype: torch.dtype,
    ends_G: Tensor | None = None,
) -> Tensor:
    """Values ``(M, columns)`` of ``quantize_nvfp4_tiles``; the tail is zero."""
    y_MK = torch.empty(len(codes), columns, dtype=dtype, device=codes.device)
    _dequantize(codes, (None, scales_SC.contiguous()), amax, y_MK, ends_G)
    return y_MK


Scales = tuple[Tensor | None, Tensor | None]  # of rows, or of tiles


def dequantize_nvfp4_columns(
    codes: Tensor,
    scales_SK: Tensor,
    amax: Tensor,
    rows: int,
    dtype: torch.dtype,
    ends_G: Tensor | None = None,
    rotation_BB: Tensor | None = None,
) -> Tensor:
    """Values ``(rows, K)`` of ``quantize_nvfp4_columns``, rotated back; the tail is zero."""
    scales_SK, multiple = scales_SK.contiguous(), row_multiple(rotation_BB)
    y_MK = torch.empty(rows, scales_SK.shape[1], dtype=dtype, device=codes.device)
    tile = column_tile(scales_SK)
    codes = codes.contiguous()
    if not torch.compiler.is_compiling() and codes.data_ptr() % 4:
        codes = codes.clone()
    if scales_SK.numel():
        _columns_kernel[column_grid(scales_SK, tile)](
            codes,
            scales_SK,
            amax.contiguous(),
            rotation_BB,
            y_MK,
            column_table(ends_G, rows, multiple),
            group_number(ends_G),
            rows,
            scales_SK.shape[1],
            len(scales_SK),
            column_width(rows, ends_G, multiple),
            codes.numel(),
            amax.shape[1] if amax.ndim == 2 else None,
            **tile,
        )
    return y_MK


def _dequantize(
    codes: Tensor, scales: Scales, amax: Tensor, y_MK: Tensor, ends_G: Tensor | None
) -> None:
    rows, columns = y_MK.shape
    shape = _ROWS if ends_G is None else _ROWS_OF_GROUPS
    tile, programs = row_tile(rows, columns, ends_G, shape)
    if programs:
        _rows_kernel[(programs,)](
            codes.contiguous(),
            *scales,
            amax,
            y_MK,
            block_table(ends_G, rows, tile["B"]),
            group_number(ends_G),
            rows,
            columns,
            codes.shape[1],
            amax.stride(0) if amax.ndim == 2 else None,
            **tile,
            **cast_options(y_MK),
        )
