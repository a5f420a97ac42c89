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

import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.blocks import (
    block_count,
    group_number,
    new_bytes,
    unit_columns,
)
from backstash.kernels.cast.pairs import high_half, low_half
from backstash.kernels.nvfp4_codes import (
    apart,
    bytes_of,
    load_seed,
    of_rows,
    over_all_of,
    scales_of,
    together,
    words_of,
)
from backstash.kernels.nvfp4_pairs import (
    are_pairs,
    inverse_of,
    largest_pair,
    row_words,
    scale_of,
)
from backstash.kernels.nvfp4_places import find_block
from backstash.kernels.reference.into import Into, noop_of
from backstash.kernels.reference.nvfp4_columns import NVFP4_BLOCK
from backstash.kernels.sizes import ceil_div, next_power_of_2

# Rows, blocks of columns, and steps of a program, and its warps.  A thread has two blocks a step
# and, of tiles, four; programs with groups have few rows, or fewer of them would be full.
_ROWS, _ROWS_OF_GROUPS, _TILES = (4, 32, 4, 2), (8, 8, 4, 1), (16, 32, 1, 4)


@triton.jit
def load_row_amax(p_amax, i_row, m_row, group, groups, row_stride):
    """Largest magnitudes over the blocks: that of each one's row, or the one of all."""
    if row_stride is not None:
        amax = tl.load(p_amax + i_row.to(tl.int64) * row_stride, mask=m_row, other=1)
    else:
        amax = tl.zeros([1], tl.float32) + tl.load(p_amax + tl.minimum(group, groups - 1))
    return amax


@triton.jit
def _load_pairs(p_x, o_row, i_block, row_stride, columns, m_row):
    """The eight pairs of blocks of columns, from two loads."""
    pairs = ()
    for i in tl.static_range(2):
        i_pair = i_block[:, None] * 8 + i * 4 + tl.arange(0, 4)[None, :]
        p_part = p_x.to(tl.pointer_type(tl.int32)) + (o_row[:, None] * (row_stride // 2) + i_pair)
        mask = m_row[:, None] & (i_pair < columns // 2)
        pairs += apart(tl.load(p_part, mask=mask, other=0), 2)
    return pairs


@triton.jit
def _scales_of_pairs(pairs, over_all, inverse, TILES: tl.constexpr):
    """What :func:`scales_of` gives, and the limit of the values."""
    N: tl.constexpr = pairs[0].shape[0]
    largest = largest_pair(pairs)
    largest = tl.maximum(low_half(largest), high_half(largest))
    if TILES:
        largest = tl.max(tl.reshape(largest, [16, N // 16]), 0)
    byte, multiplier, limit = scale_of(largest, over_all, inverse)
    return byte, of_rows(multiplier, N), of_rows(limit, N)


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
    PAIRS: tl.constexpr,
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
    amax = load_row_amax(p_amax, first + i_row, m_row, group, groups, amax_stride)
    if PAIRS:
        over_all = over_all_of(amax)
        inverse = inverse_of(over_all)
    seed = load_seed(p_seed)
    for i_step in range(STEPS):
        i_block = (i_chunk * STEPS + i_step) * BC + tl.arange(0, B * BC) % BC
        if PAIRS:
            pairs = _load_pairs(p_x, o_row, i_block, row_stride, columns, m_row)
            byte, multiplier, limit = _scales_of_pairs(pairs, over_all, inverse, TILES)
        else:
            x = ()
            for i in tl.static_range(16 >> WIDE):
                i_part = i * (1 << WIDE) + tl.arange(0, 1 << WIDE)[None, :]
                i_column = i_block[:, None] * 16 + i_part
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
        if PAIRS:
            words = row_words(pairs, multiplier, limit, seed, i_draw, 2 if TILES else 0)
        else:
            words = words_of(x, multiplier, seed, i_draw, 2 if TILES else 0)
        words = together(words, 1)
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
    p_ends,
    p_noop,
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
    PAIRS: tl.constexpr,
    BG: tl.constexpr,
):
    if p_noop is not None and tl.load(p_noop) != 0:
        return
    chunks = tl.cdiv(tl.cdiv(columns, 16), BC * STEPS)
    i_rows = tl.program_id(0) // chunks
    first, end, group = find_block(p_ends, groups, rows, i_rows, B, BG)
    # No group needs the block; of tiles the scales are to be zeros all the same.
    if p_ends is not None and p_tile_scales is None and first >= end:
        return
    along_rows(
        p_x, p_codes, p_row_scales, p_tile_scales, p_amax, p_seed, first, end, group, groups,
        columns, width, row_stride, amax_stride, i_rows, tl.program_id(0) % chunks,
        B, BC, STEPS, WIDE, WORDS, CANDIDATES, OFFSET, PAIRS,
    )  # fmt: skip


def quantize_nvfp4_rows(
    x_MK: Tensor,
    amax: Tensor,
    ends_G: Tensor | None = None,
    seed: Tensor | None = None,
    *,
    four_over_six: bool = False,
    into: Into | None = None,
) -> tuple[Tensor, Tensor]:
    """Blocks along rows: codes ``(M, ceil(K/2))`` and E4M3 scales ``(M, C)``, both bytes.

    What stands in rows past the last group is unspecified.
    """
    codes, scales_MC = new_rows(x_MK) if into is None else into.buffers
    outputs = (codes, scales_MC, None)
    _quantize(x_MK, (amax, ends_G, seed, noop_of(into)), outputs, 1 + four_over_six)
    return codes, scales_MC


def quantize_nvfp4_tiles(
    x_MK: Tensor,
    amax: Tensor,
    ends_G: Tensor | None = None,
    seed: Tensor | None = None,
    *,
    four_over_six: bool = False,
    into: Into | None = None,
) -> tuple[Tensor, Tensor]:
    """Tiles of 16 by 16: codes ``(M, ceil(K/2))`` and E4M3 scales ``(S, C)``, both bytes.

    What stands in codes past the last group is unspecified.
    """
    if into is None:
        blocks = block_count(len(x_MK), ends_G, NVFP4_BLOCK)
        scales_SC = new_bytes(blocks, ceil_div(x_MK.shape[1], NVFP4_BLOCK), like=x_MK)
        codes = new_bytes(len(x_MK), ceil_div(x_MK.shape[1], 2), like=x_MK)
    else:
        codes, scales_SC = into.buffers
    outputs = (codes, None, scales_SC)
    _quantize(x_MK, (amax, ends_G, seed, noop_of(into)), outputs, 1 + four_over_six)
    return codes, scales_SC


def new_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales along rows that nobody has written yet."""
    rows, columns = x_MK.shape
    scales_MC = new_bytes(rows, ceil_div(columns, NVFP4_BLOCK), like=x_MK)
    return new_bytes(rows, ceil_div(columns, 2), like=x_MK), scales_MC


def _quantize(
    x_MK: Tensor,
    given: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    outputs: tuple[Tensor, Tensor | None, Tensor | None],
    candidates: int,
) -> None:
    """``given`` are largest magnitudes, ends, seed and flag; outputs codes, scales of either."""
    x_MK = unit_columns(x_MK)
    rows, columns = x_MK.shape
    (amax, ends_G, seed, noop), width = given, outputs[0].shape[1]
    shape = _TILES if outputs[1] is None else _ROWS if ends_G is None else _ROWS_OF_GROUPS
    tile, programs = row_tile(rows, columns, ends_G, shape)
    groups = group_number(ends_G)
    if programs:
        _quantize_kernel[(programs,)](
            x_MK,
            *outputs,
            amax,
            seed,
            None if ends_G is None else ends_G.contiguous(),
            noop,
            groups,
            rows,
            columns,
            width,
            x_MK.stride(0),
            amax.stride(0) if amax.ndim == 2 else None,
            **tile,
            **cast_options(x_MK),
            WORDS=width % 8 == 0,
            CANDIDATES=candidates,
            PAIRS=are_pairs(x_MK, candidates),
            BG=next_power_of_2(groups),
        )


def row_tile(
    rows: int, columns: int, ends_G: Tensor | None, shape: tuple[int, int, int, int]
) -> tuple[dict[str, Any], int]:
    """The constants of a launch of programs of some shape, and how many there are."""
    B, BC, steps, warps = shape
    blocks = ceil_div(columns, NVFP4_BLOCK)
    BC = min(BC, next_power_of_2(max(8, blocks)))
    # As many steps as leave the fewest without a block.
    slices = max(1, ceil_div(blocks, BC))
    steps = min(range(1, steps + 1), key=lambda step: (ceil_div(slices, step) * step, -step))
    programs = block_count(rows, ends_G, B) * ceil_div(blocks, BC * steps)
    return {"B": B, "BC": BC, "STEPS": steps, "num_warps": warps}, programs


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
