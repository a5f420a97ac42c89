"""NVFP4 along rows and in tiles on a GPU: the twins of ``backstash.kernels.reference.nvfp4``.

A thread has whole blocks: their 16 values come in a few wide loads, their codes are 8 bytes
side by side.  Tiles of 16 by 16 are sixteen such blocks whose largest magnitudes meet.

Letters: M rows, K columns, G groups, S blocks of rows, C blocks of columns, B rows of a program.
"""

# What is known when a kernel is compiled has a type that this checker takes for Python's.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false

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
from backstash.kernels.nvfp4_codes import (
    apart,
    bytes_of,
    factor_of,
    scales_of,
    together,
    values_of,
    words_of,
)
from backstash.kernels.reference.nvfp4_columns import NVFP4_BLOCK

# Rows, blocks of columns, and steps of a program: programs with groups have sixteen rows, or
# fewer of them would be full; a program that stores wide values has one block a thread.
_ROWS, _ROWS_OF_GROUPS, _TILES = (8, 32, 4), (16, 32, 4), (16, 32, 1)
_VALUES, _VALUES_OF_GROUPS = (4, 32, 1), (16, 8, 1)


@triton.jit
def _load_amax(p_amax, i_row, m_row, group, groups, row_stride):
    """Largest magnitudes over the blocks: that of each one's row, or the one of all."""
    if row_stride is not None:
        amax = tl.load(p_amax + i_row.to(tl.int64) * row_stride, mask=m_row, other=1)
    else:
        amax = tl.zeros([1], tl.float32) + tl.load(p_amax + tl.minimum(group, groups - 1))
    return amax


@triton.jit
def along_rows(
    p_x,
    p_codes,
    p_row_scales,
    p_tile_scales,
    p_amax,
    p_seed,
    first,
    end,
    group,
    groups,
    columns,
    width,
    row_stride,
    amax_stride,
    i_rows,
    i_chunk,
    B: tl.constexpr,
    BC: tl.constexpr,
    STEPS: tl.constexpr,
    WIDE: tl.constexpr,
    WORDS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Codes of B rows and ``BC * STEPS`` blocks of columns; ``2^WIDE`` values a load."""
    TILES: tl.constexpr = p_tile_scales is not None
    blocks = tl.cdiv(columns, 16)
    # The tail is not read; its codes are nobody's.
    end = tl.where(group < groups, end, first)
    o_first = tl.cast(first, tl.int64)
    p_x += o_first * row_stride
    p_codes += o_first * width
    i_row = tl.arange(0, B * BC) // BC
    m_row = first + i_row < end
    o_row = i_row.to(OFFSET)
    amax = _load_amax(p_amax, first + i_row, m_row, group, groups, amax_stride)
    for i_step in range(STEPS):
        i_block = (i_chunk * STEPS + i_step) * BC + tl.arange(0, B * BC) % BC
        x = ()
        for i in tl.static_range(16 >> WIDE):
            i_column = i_block[:, None] * 16 + i * (1 << WIDE) + tl.arange(0, 1 << WIDE)[None, :]
            mask = m_row[:, None] & (i_column < columns)
            p_part = p_x + (o_row[:, None] * row_stride + i_column)
            x += apart(tl.load(p_part, mask=mask, other=0).to(tl.float32), WIDE)
        byte, multiplier = scales_of(x, amax, TILES, CANDIDATES)
        if TILES:
            i_tile = (i_chunk * STEPS + i_step) * BC + tl.arange(0, BC)
            o_block = tl.cast(i_rows, tl.int64) * blocks
            tl.store(p_tile_scales + o_block + i_tile, byte.to(tl.uint8), mask=i_tile < blocks)
            i_draw = (o_block + i_block) * 16 + i_row
        else:
            p_scale = p_row_scales + o_first * blocks + (o_row * blocks + i_block)
            tl.store(p_scale, byte.to(tl.uint8), mask=m_row & (i_block < blocks))
            i_draw = (o_first + i_row) * blocks + i_block
        words = together(words_of(x, multiplier, p_seed, i_draw, 2 if TILES else 0), 1)
        i_word = i_block[:, None] * 2 + tl.arange(0, 2)[None, :]
        if WORDS:
            p_words = p_codes.to(tl.pointer_type(tl.uint32)) + o_row[:, None] * (width // 4)
            mask = m_row[:, None] & (i_word < width // 4)
            tl.store(p_words + i_word, words, mask=mask)
        else:
            i_byte = i_word[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]
            mask = m_row[:, None, None] & (i_byte < width)
            p_bytes = p_codes + (o_row[:, None, None] * width + i_byte)
            tl.store(p_bytes, bytes_of(words), mask=mask)


@triton.jit(do_not_specialize=["groups", "rows"])
def _quantize_kernel(
    p_x,
    p_codes,
    p_row_scales,
    p_tile_scales,
    p_amax,
    p_seed,
    p_table,
    groups,
    rows,
    columns,
    width,
    row_stride,
    amax_stride,
    B: tl.constexpr,
    BC: tl.constexpr,
    STEPS: tl.constexpr,
    WIDE: tl.constexpr,
    WORDS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    OFFSET: tl.constexpr,
):
    chunks = tl.cdiv(tl.cdiv(columns, 16), BC * STEPS)
    i_rows = tl.program_id(0) // chunks
    first, end, group = locate_block(p_table, rows, i_rows, B)
    along_rows(
        p_x, p_codes, p_row_scales, p_tile_scales, p_amax, p_seed, first, end, group, groups,
        columns, width, row_stride, amax_stride, i_rows, tl.program_id(0) % chunks,
        B, BC, STEPS, WIDE, WORDS, CANDIDATES, OFFSET,
    )  # fmt: skip


@triton.jit(do_not_specialize=["groups", "rows"])
def _dequantize_kernel(
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
    o_first = tl.cast(first, tl.int64)
    p_codes += o_first * width
    p_y += o_first * columns
    i_row = tl.arange(0, B * BC) // BC
    m_row = first + i_row < end
    # The tail is written, as zeros, and never read.
    m_read = first + i_row < tl.where(group < groups, end, first)
    o_row = i_row.to(OFFSET)
    amax = _load_amax(p_amax, first + i_row, m_read, group, groups, amax_stride)
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


def quantize_nvfp4_rows(
    x_MK: Tensor,
    amax: Tensor,
    ends_G: Tensor | None = None,
    seed: Tensor | None = None,
    *,
    four_over_six: bool = False,
) -> tuple[Tensor, Tensor]:
    """Blocks along rows: codes ``(M, ceil(K/2))`` and E4M3 scales ``(M, C)``, both bytes.

    What stands in rows past the last group is unspecified.
    """
    scales_MC = new_bytes(len(x_MK), triton.cdiv(x_MK.shape[1], NVFP4_BLOCK), like=x_MK)
    codes = _quantize(x_MK, amax, ends_G, seed, (scales_MC, None), 1 + four_over_six)
    return codes, scales_MC


def quantize_nvfp4_tiles(
    x_MK: Tensor,
    amax: Tensor,
    ends_G: Tensor | None = None,
    seed: Tensor | None = None,
    *,
    four_over_six: bool = False,
) -> tuple[Tensor, Tensor]:
    """Tiles of 16 by 16: codes ``(M, ceil(K/2))`` and E4M3 scales ``(S, C)``, both bytes.

    What stands in codes past the last group is unspecified.
    """
    blocks = block_count(len(x_MK), ends_G, NVFP4_BLOCK)
    scales_SC = new_bytes(blocks, triton.cdiv(x_MK.shape[1], NVFP4_BLOCK), like=x_MK)
    codes = _quantize(x_MK, amax, ends_G, seed, (None, scales_SC), 1 + four_over_six)
    return codes, scales_SC


def dequantize_nvfp4_rows(
    codes: Tensor,
    scales_MC: Tensor,
    amax: Tensor,
    columns: int,
    dtype: torch.dtype,
    ends_G: Tensor | None = None,
) -> Tensor:
    """Values ``(M, columns)`` of :func:`quantize_nvfp4_rows`; the tail is zero."""
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
    """Values ``(M, columns)`` of :func:`quantize_nvfp4_tiles`; the tail is zero."""
    y_MK = torch.empty(len(codes), columns, dtype=dtype, device=codes.device)
    _dequantize(codes, (None, scales_SC.contiguous()), amax, y_MK, ends_G)
    return y_MK


Scales = tuple[Tensor | None, Tensor | None]  # of rows, or of tiles


def _quantize(
    x_MK: Tensor,
    amax: Tensor,
    ends_G: Tensor | None,
    seed: Tensor | None,
    scales: Scales,
    candidates: int,
) -> Tensor:
    x_MK = unit_columns(x_MK)
    rows, columns = x_MK.shape
    codes = new_bytes(rows, triton.cdiv(columns, 2), like=x_MK)
    shape = _TILES if scales[0] is None else _ROWS if ends_G is None else _ROWS_OF_GROUPS
    tile, programs = _tile(rows, columns, ends_G, shape)
    if programs:
        _quantize_kernel[(programs,)](
            x_MK,
            codes,
            *scales,
            amax,
            seed,
            block_table(ends_G, rows, tile["B"]),
            group_number(ends_G),
            rows,
            columns,
            codes.shape[1],
            x_MK.stride(0),
            amax.stride(0) if amax.ndim == 2 else None,
            **tile,
            **cast_options(x_MK),
            WORDS=codes.shape[1] % 8 == 0,
            CANDIDATES=candidates,
        )
    return codes


def _dequantize(
    codes: Tensor, scales: Scales, amax: Tensor, y_MK: Tensor, ends_G: Tensor | None
) -> None:
    rows, columns = y_MK.shape
    shape = _VALUES if ends_G is None else _VALUES_OF_GROUPS
    tile, programs = _tile(rows, columns, ends_G, shape)
    if programs:
        _dequantize_kernel[(programs,)](
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


def _tile(
    rows: int, columns: int, ends_G: Tensor | None, shape: tuple[int, int, int]
) -> tuple[dict[str, Any], int]:
    """The constants of a launch of programs of some shape, and how many there are."""
    B, BC, steps = shape
    blocks = triton.cdiv(columns, NVFP4_BLOCK)
    BC = min(BC, triton.next_power_of_2(max(8, blocks)))
    # As many steps as leave the fewest without a block.
    slices = max(1, triton.cdiv(blocks, BC))
    steps = min(range(1, steps + 1), key=lambda step: (triton.cdiv(slices, step) * step, -step))
    programs = block_count(rows, ends_G, B) * triton.cdiv(blocks, BC * steps)
    return {"B": B, "BC": BC, "STEPS": steps}, programs


def cast_options(x_MK: Tensor) -> dict[str, Any]:
    """How a cast from or to ``x_MK`` is compiled: values a load, and how it addresses rows."""
    # The first row of a program is addressed in 64 bits; its others, from there, in fewer.
    farthest = (NVFP4_BLOCK + 1) * max(x_MK.stride(0), x_MK.shape[1])
    return {
        "WIDE": (16 // x_MK.element_size()).bit_length() - 1,
        "OFFSET": tl.int32 if farthest < 2**31 else tl.int64,
        # No product may be added without having been rounded.
        "enable_fp_fusion": False,
    }
