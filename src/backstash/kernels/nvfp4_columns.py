"""NVFP4 down columns on a GPU: transposed codes, group by group, and their values again.

A program works on several blocks of 16 rows.  A thread has whole blocks of neighbouring
columns, so it finds their largest magnitudes alone, and the transform mixes rows in its
registers.  The eight bytes of a block then change threads, so that the bytes of one column
leave side by side.  A first launch writes where the rows and the bytes of each block are;
blocks that no group needs get a piece each of what is past the last group, and clear it.

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

from backstash.kernels.blocks import block_count, group_number, new_bytes, unit_columns
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
from backstash.kernels.reference.nvfp4_columns import NVFP4_BLOCK, nvfp4_column_bytes

_BLOCKS, _COLUMNS, _COLUMNS_A_THREAD = 8, 64, 4


@triton.jit(do_not_specialize=["groups", "rows", "blocks", "bound"])
def _table_kernel(
    p_ends,
    p_table,
    groups,
    rows,
    blocks,
    bound,
    MULTIPLE: tl.constexpr,
    BG: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program writes the entries of one group; the last, those of the tail.

    An entry is first row, row after the last, group, bytes of a column in all groups before,
    bytes of one in this group, and bytes of one in this group's blocks before.
    """
    group = tl.program_id(0)
    i_group = tl.arange(0, BG)
    ends = _end(p_ends + i_group, i_group < groups, rows)
    before = _end(p_ends + i_group - 1, (i_group > 0) & (i_group < groups), rows)
    counts = tl.maximum(ends - before, 0)
    m_before = i_group < group
    first_block = tl.sum(tl.where(m_before, (counts + 15) // 16, 0), 0)
    prefix = tl.sum(tl.where(m_before, (counts + MULTIPLE - 1) // MULTIPLE, 0), 0) * (MULTIPLE // 2)
    # The tail begins where the last group ends, and takes all entries that are left.  Each is
    # like a group of its own, of 16 rows, and narrower at the end of the buffer.
    in_tail = group >= groups
    start = _end(p_ends + group - 1, group > 0, rows)
    end = tl.where(in_tail, rows, _end(p_ends + group, group < groups, rows))
    count = tl.maximum(end - start, 0)
    width = (count + MULTIPLE - 1) // MULTIPLE * (MULTIPLE // 2)
    count = tl.where(in_tail, blocks, (count + 15) // 16)
    count = tl.minimum(count, blocks - tl.minimum(first_block, blocks))
    i_entry = tl.arange(0, 8)[None, :]
    for i in range(0, count, CHUNK):
        i_block = i + tl.arange(0, CHUNK)[:, None]
        first = tl.minimum(start + i_block * 16, end)
        bytes_before = tl.where(in_tail, 0, i_block * 8)
        of_columns = prefix + i_block * 8 - bytes_before
        left = tl.minimum(tl.maximum(bound - of_columns, 0), 8)
        entry = tl.where(i_entry == 0, first, tl.minimum(first + 16, end))
        entry = tl.where(i_entry == 2, group, entry)
        entry = tl.where(i_entry == 3, of_columns, entry)
        entry = tl.where(i_entry == 4, tl.where(in_tail, left, width), entry)
        entry = tl.where(i_entry == 5, bytes_before, entry)
        tl.store(p_table + (first_block + i_block) * 8 + i_entry, entry, mask=i_block < count)


@triton.jit
def _end(p_end, mask, rows):
    """The end of a group, cut at the buffer; zero before the first."""
    end = tl.load(p_end, mask=mask, other=0)
    return tl.minimum(tl.maximum(end, 0), rows).to(tl.int32)


@triton.jit
def _locate(p_table, rows, width, i_block, blocks, ALIGNED: tl.constexpr):
    """What the table says of some blocks; without one, what is plain to see."""
    if p_table is None:
        first = tl.minimum(i_block * 16, rows)
        end = tl.minimum(first + 16, rows)
        group, prefix, before = i_block * 0, i_block * 0, i_block * 8
        # A block past the last has no bytes.
        width = tl.where(i_block < blocks, width, 0)
    else:
        p_entry, m_block = p_table + i_block * 8, i_block < blocks
        first = tl.load(p_entry, mask=m_block, other=0)
        end = tl.load(p_entry + 1, mask=m_block, other=0)
        group = tl.load(p_entry + 2, mask=m_block, other=0)
        prefix = tl.load(p_entry + 3, mask=m_block, other=0)
        width = tl.load(p_entry + 4, mask=m_block, other=0)
        before = tl.load(p_entry + 5, mask=m_block, other=0)
        if ALIGNED:
            prefix, width = tl.multiple_of(prefix, 8), tl.multiple_of(width, 8)
            before = tl.multiple_of(before, 8)
    return first, end, group, prefix, width, before


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
    first, end, group, prefix, width, before = _locate(p_table, rows, width, i_block, blocks, WORDS)
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
    words = tl.reshape(together(words, 1), [NB, BK, 2])
    i_word = tl.arange(0, 2)
    p_block = p_codes + prefix.to(tl.int64) * columns + before
    o_column = i_column.to(tl.int64)[None, :] * width[:, None]
    if WORDS:
        p_words = (p_block[:, None] + o_column).to(tl.pointer_type(tl.uint32))
        mask = (before < width)[:, None, None] & m_column[None, :, None]
        tl.store(p_words[:, :, None] + i_word[None, None, :], words, mask=mask)
    else:
        i_byte = i_word[:, None] * 4 + tl.arange(0, 4)[None, :]
        p_bytes = p_block[:, None, None] + i_byte[None, :, :]
        m_byte = before[:, None, None] + i_byte[None, :, :] < width[:, None, None]
        mask = m_byte[:, None, :, :] & m_column[None, :, None, None]
        p_bytes = p_bytes[:, None, :, :] + o_column[:, :, None, None]
        tl.store(p_bytes, bytes_of(words), mask=mask)


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
    first, end, group, prefix, width, before = _locate(p_table, rows, width, i_block, blocks, False)
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


def new_columns(x_MK: Tensor, ends_G: Tensor | None, multiple: int) -> tuple[Tensor, Tensor]:
    """Codes, flat, and scales ``(S, K)`` that nobody has written yet."""
    rows, columns = x_MK.shape
    size = nvfp4_column_bytes(rows, columns, None if ends_G is None else len(ends_G), multiple)
    codes = torch.empty(size, dtype=torch.uint8, device=x_MK.device)
    return codes, new_bytes(block_count(rows, ends_G, NVFP4_BLOCK), columns, like=x_MK)


def row_multiple(rotation_BB: Tensor | None) -> int:
    """To how many rows the columns of a group are padded."""
    return 2 if rotation_BB is None else NVFP4_BLOCK


def column_width(rows: int, ends_G: Tensor | None, multiple: int) -> int:
    """Bytes of a column of a matrix without groups; the table knows those of groups."""
    return triton.cdiv(rows, multiple) * multiple // 2 if ends_G is None else 0


def are_words(rows: int, ends_G: Tensor | None, multiple: int) -> bool:
    """Whether the eight bytes of each block are known to lie at a multiple of eight."""
    width = column_width(rows, ends_G, multiple)
    return multiple == NVFP4_BLOCK or (ends_G is None and width % 8 == 0)


def column_table(ends_G: Tensor | None, rows: int, multiple: int) -> Tensor | None:
    """Where the rows and the bytes of each block are: int32 ``(S, 8)``."""
    if ends_G is None:
        return None
    blocks, groups = block_count(rows, ends_G, NVFP4_BLOCK), len(ends_G)
    table_S8 = torch.empty(blocks, 8, dtype=torch.int32, device=ends_G.device)
    tile: dict[str, Any] = {"BG": triton.next_power_of_2(groups), "CHUNK": 512}
    bound = nvfp4_column_bytes(rows, 1, groups, multiple)
    _table_kernel[(groups + 1,)](
        ends_G.contiguous(), table_S8, groups, rows, blocks, bound, MULTIPLE=multiple, **tile
    )
    return table_S8


def _tile(scales_SK: Tensor) -> tuple[dict[str, Any], int]:
    """The constants of a launch, and how many programs it has."""
    blocks, columns = scales_SK.shape
    BK = min(_COLUMNS, max(16, triton.next_power_of_2(columns)))
    programs = triton.cdiv(blocks, _BLOCKS) * triton.cdiv(columns, BK)
    # No product may be added without having been rounded.
    return {"NB": _BLOCKS, "BK": BK, "V": _COLUMNS_A_THREAD, "enable_fp_fusion": False}, programs
