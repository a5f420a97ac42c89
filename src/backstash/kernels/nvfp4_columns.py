"""NVFP4 down columns on a GPU: transposed codes, group by group, and their values again.

A program works on several blocks of 16 rows.  A thread has whole blocks of neighbouring
columns, so it finds their largest magnitudes alone, and the transform mixes rows in its
registers.  The eight bytes of a block then change threads, so that the bytes of one column
leave side by side: together where all blocks of a program lie at multiples of eight.

Letters: M rows, K columns, G groups, S blocks of 16 rows, B = 16.
"""

# What is known when a kernel is compiled has a type that this checker takes for Python's.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.blocks import group_number, unit_columns
from backstash.kernels.hadamard import narrow, rotate, rotate_back
from backstash.kernels.nvfp4_codes import (
    apart,
    bytes_of,
    factor_of,
    scales_of,
    together,
    values_of,
    words_of,
)
from backstash.kernels.nvfp4_places import (
    are_words,
    column_table,
    column_width,
    locate_blocks,
    new_columns,
    row_multiple,
)

_BLOCKS, _COLUMNS, _COLUMNS_A_THREAD = 8, 64, 4


@triton.jit
def _byte_places(p_codes, prefix, width, before, i_column, columns):
    """Where the eight bytes of blocks and columns ``(NB, BK, 8)`` are, and which exist."""
    i_byte = tl.arange(0, 8)
    p_block = p_codes + (prefix.to(tl.int64) * columns + before)[:, None] + i_byte[None, :]
    o_column = i_column.to(tl.int64)[None, :] * width[:, None]
    m_byte = before[:, None] + i_byte[None, :] < width[:, None]
    mask = m_byte[:, None, :] & (i_column < columns)[None, :, None]
    return p_block[:, None, :] + o_column[:, :, None], mask


@triton.jit
def _store_blocks(p_codes, place, words, mask):
    """Eight bytes of each block to places ``(NB, BK)`` that are multiples of eight."""
    block = words[0].to(tl.uint64) | (words[1].to(tl.uint64) << 32)
    p_blocks = p_codes.to(tl.pointer_type(tl.uint64)) + (place >> 3)
    tl.store(p_blocks, tl.reshape(block, place.shape), mask=mask)


@triton.jit
def _store_bytes(p_codes, place, words, mask, left):
    """The same to any places, of each block as many bytes as are ``left`` of its group."""
    i_byte = tl.arange(0, 2)[:, None] * 4 + tl.arange(0, 4)[None, :]
    mask = mask[:, :, None, None] & (i_byte[None, :, :] < left[:, None, None])[:, None, :, :]
    p_bytes = p_codes + place[:, :, None, None] + i_byte[None, None, :, :]
    words = tl.reshape(together(words, 1), [place.shape[0], place.shape[1], 2])
    tl.store(p_bytes, bytes_of(words), mask=mask)


@triton.jit
def _load_amax(p_amax, group, groups, i_column, columns, group_stride):
    """Largest magnitudes over blocks and columns, those of a group or of its columns."""
    group = tl.minimum(group, groups - 1)
    if group_stride is None:
        amax = tl.load(p_amax + group)[:, None] + tl.zeros_like(i_column).to(tl.float32)[None, :]
    else:
        p_column = p_amax + group.to(tl.int64)[:, None] * group_stride + i_column[None, :]
        amax = tl.load(p_column, mask=(i_column < columns)[None, :], other=1)
    return tl.reshape(amax, [group.shape[0] * i_column.shape[0]])


@triton.jit
def down_columns(
    p_x,
    p_codes,
    p_scales,
    p_amax,
    p_rotation,
    p_seed,
    p_table,
    groups,
    rows,
    columns,
    blocks,
    width,
    row_stride,
    amax_stride,
    i_program,
    NB: tl.constexpr,
    BK: tl.constexpr,
    V: tl.constexpr,
    WORDS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Codes of NB blocks of rows in BK columns, of which a thread gets V side by side."""
    chunks = tl.cdiv(columns, BK)
    i_block = (i_program // chunks) * NB + tl.arange(0, NB)
    i_column = tl.max_contiguous((i_program % chunks) * BK + tl.arange(0, BK), V)
    m_column = i_column < columns
    first, end, group, prefix, width, before = locate_blocks(p_table, rows, width, i_block, blocks)
    # The tail is not read: zeros have codes and a scale of zero.
    end = tl.where(group < groups, end, first)
    stride = tl.cast(row_stride, tl.int64)
    p_tile = p_x + first.to(tl.int64)[:, None] * stride + i_column[None, :]
    x = ()
    for i in tl.static_range(16):
        mask = (first + i < end)[:, None] & m_column[None, :]
        row = tl.load(p_tile + i * stride, mask=mask, other=0).to(tl.float32)
        if p_rotation is not None:
            row = narrow(row)
        x += (tl.reshape(row, [NB * BK]),)
    if p_rotation is not None:
        x = rotate(x)
        narrowed = ()
        for i in tl.static_range(16):
            narrowed += (narrow(x[i]),)
        x = narrowed
    amax = _load_amax(p_amax, group, groups, i_column, columns, amax_stride)
    byte, multiplier = scales_of(x, amax, False, CANDIDATES)
    o_scale = i_block.to(tl.int64)[:, None] * columns + i_column[None, :]
    mask = (i_block < blocks)[:, None] & m_column[None, :]
    tl.store(p_scales + o_scale, tl.reshape(byte, [NB, BK]).to(tl.uint8), mask=mask)
    words = words_of(x, multiplier, p_seed, tl.reshape(o_scale, [NB * BK]), 1)
    place = (prefix.to(tl.int64) * columns + before)[:, None]
    place += i_column.to(tl.int64)[None, :] * width[:, None]
    m_column = (before < width)[:, None] & m_column[None, :]
    # Groups of whole blocks lie at multiples of eight, though nobody promised it.
    uneven = 0 if WORDS else tl.max(((prefix * columns) | width) & 7, 0)
    if uneven == 0:
        _store_blocks(p_codes, place, words, m_column)
    else:
        _store_bytes(p_codes, place, words, m_column, width - before)


@triton.jit(do_not_specialize=["groups", "rows", "blocks"])
def _quantize_kernel(
    p_x,
    p_codes,
    p_scales,
    p_amax,
    p_rotation,
    p_seed,
    p_table,
    groups,
    rows,
    columns,
    blocks,
    width,
    row_stride,
    amax_stride,
    NB: tl.constexpr,
    BK: tl.constexpr,
    V: tl.constexpr,
    WORDS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    down_columns(
        p_x, p_codes, p_scales, p_amax, p_rotation, p_seed, p_table, groups, rows, columns,
        blocks, width, row_stride, amax_stride, tl.program_id(0), NB, BK, V, WORDS, CANDIDATES,
    )  # fmt: skip


# Bytes are read one by one: a thread with a block of them would have values of few columns.
@triton.jit(do_not_specialize=["groups", "rows", "blocks", "width"])
def _dequantize_kernel(
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
    amax_stride,
    NB: tl.constexpr,
    BK: tl.constexpr,
    V: tl.constexpr,
):
    chunks = tl.cdiv(columns, BK)
    i_block = (tl.program_id(0) // chunks) * NB + tl.arange(0, NB)
    i_column = tl.max_contiguous((tl.program_id(0) % chunks) * BK + tl.arange(0, BK), V)
    m_column = i_column < columns
    first, end, group, prefix, width, before = locate_blocks(p_table, rows, width, i_block, blocks)
    # The tail is written, as zeros, and never read.
    m_read = (group < groups) & (i_block < blocks)
    o_scale = i_block.to(tl.int64)[:, None] * columns + i_column[None, :]
    mask = m_read[:, None] & m_column[None, :]
    scale = tl.load(p_scales + o_scale, mask=mask, other=0)
    scale = tl.reshape(scale.to(tl.float8e4nv, bitcast=True).to(tl.float32), [NB * BK])
    amax = _load_amax(p_amax, group, groups, i_column, columns, amax_stride)
    factor = tl.where(tl.reshape(mask, [NB * BK]), factor_of(scale, amax), 0.0)
    p_byte, mask = _byte_places(p_codes, prefix, width, before, i_column, columns)
    codes = tl.load(p_byte, mask=mask & m_read[:, None, None], other=0)
    y = values_of(apart(tl.reshape(codes.to(tl.int32), [NB * BK, 8]), 3), factor)
    if p_rotation is not None:
        y = rotate_back(y)
    p_tile = p_y + first.to(tl.int64)[:, None] * columns + i_column[None, :]
    for i in tl.static_range(16):
        mask = ((first + i < end) & (i_block < blocks))[:, None] & m_column[None, :]
        row = tl.reshape(y[i], [NB, BK]).to(p_y.dtype.element_ty)
        tl.store(p_tile + i * tl.cast(columns, tl.int64), row, mask=mask)


def quantize_nvfp4_columns(
    x_MK: Tensor,
    amax: Tensor,
    ends_G: Tensor | None = None,
    rotation_BB: Tensor | None = None,
    seed: Tensor | None = None,
    *,
    four_over_six: bool = False,
) -> tuple[Tensor, Tensor]:
    """Blocks down columns: transposed codes, flat, and E4M3 scales ``(S, K)``, both bytes.

    ``rotation_BB`` is ``hadamard_matrix``, whose signs are compiled into the kernel.
    """
    x_MK = unit_columns(x_MK)
    rows, columns = x_MK.shape
    multiple = row_multiple(rotation_BB)
    codes, scales_SK = new_columns(x_MK, ends_G, multiple)
    tile, programs = _tile(scales_SK)
    if programs:
        _quantize_kernel[(programs,)](
            x_MK,
            codes,
            scales_SK,
            amax.contiguous(),
            rotation_BB,
            seed,
            column_table(ends_G, rows, multiple),
            group_number(ends_G),
            rows,
            columns,
            len(scales_SK),
            column_width(rows, ends_G, multiple),
            x_MK.stride(0),
            amax.shape[1] if amax.ndim == 2 else None,
            **tile,
            WORDS=are_words(rows, ends_G, multiple),
            CANDIDATES=1 + four_over_six,
        )
    return codes, scales_SK


def dequantize_nvfp4_columns(
    codes: Tensor,
    scales_SK: Tensor,
    amax: Tensor,
    rows: int,
    dtype: torch.dtype,
    ends_G: Tensor | None = None,
    rotation_BB: Tensor | None = None,
) -> Tensor:
    """Values ``(rows, K)`` of :func:`quantize_nvfp4_columns`, rotated back; the tail is zero."""
    scales_SK, multiple = scales_SK.contiguous(), row_multiple(rotation_BB)
    y_MK = torch.empty(rows, scales_SK.shape[1], dtype=dtype, device=codes.device)
    tile, programs = _tile(scales_SK)
    if programs:
        _dequantize_kernel[(programs,)](
            codes.contiguous(),
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
            amax.shape[1] if amax.ndim == 2 else None,
            **tile,
        )
    return y_MK


def _tile(scales_SK: Tensor) -> tuple[dict[str, Any], int]:
    """The constants of a launch, and how many programs it has."""
    blocks, columns = scales_SK.shape
    BK = min(_COLUMNS, max(16, triton.next_power_of_2(columns)))
    programs = triton.cdiv(blocks, _BLOCKS) * triton.cdiv(columns, BK)
    # No product may be added without having been rounded.
    return {
        "NB": _BLOCKS,
        "BK": BK,
        "V": _COLUMNS_A_THREAD,
        "enable_fp_fusion": False,
    }, programs
