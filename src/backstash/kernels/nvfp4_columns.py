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

import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.blocks import group_number, unit_columns
from backstash.kernels.cast.pairs import high_half, low_half
from backstash.kernels.hadamard import narrow, rotate
from backstash.kernels.nvfp4_codes import (
    load_seed,
    over_all_of,
    scales_of,
    words_of,
)
from backstash.kernels.nvfp4_pairs import (
    are_pairs,
    column_words,
    inverse_of,
    narrow_pair,
)
from backstash.kernels.nvfp4_parts import (
    BLOCKS,
    clear_blocks,
    load_parts,
    store_blocks,
    store_shifted,
)
from backstash.kernels.nvfp4_places import (
    are_words,
    column_grid,
    column_table,
    column_width,
    locate_blocks,
    look_at_blocks,
    new_columns,
    place_of,
    row_multiple,
)
from backstash.kernels.reference.into import Into, noop_of
from backstash.kernels.sizes import next_power_of_2

_COLUMNS, _COLUMNS_A_THREAD = 64, 4
# With so many a thread, seven programs fit on a multiprocessor of Hopper.
_REGISTERS = 72


@triton.jit
def load_column_amax(p_amax, group, groups, i_column, columns, group_stride):
    """Largest magnitudes over blocks and columns, those of a group or of its columns."""
    group = tl.minimum(group, groups - 1)
    if group_stride is None:
        amax = tl.load(p_amax + group)[:, None] + tl.zeros_like(i_column).to(tl.float32)[None, :]
    else:
        p_column = p_amax + group.to(tl.int64)[:, None] * group_stride + i_column[None, :]
        amax = tl.load(p_column, mask=(i_column < columns)[None, :], other=1)
    return tl.reshape(amax, [group.shape[0] * i_column.shape[0]])


@triton.jit
def _load_blocks(p_x, first, end, i_column, row_stride, columns, p_rotation):
    """The 16 rows of blocks as float32, rotated and rounded with a rotation."""
    N: tl.constexpr = first.shape[0] * i_column.shape[0]
    stride = tl.cast(row_stride, tl.int64)
    p_tile = p_x + first.to(tl.int64)[:, None] * stride + i_column[None, :]
    x = ()
    for i in tl.static_range(16):
        mask = (first + i < end)[:, None] & (i_column < columns)[None, :]
        row = tl.load(p_tile + i * stride, mask=mask, other=0).to(tl.float32)
        if p_rotation is not None:
            row = narrow(row)
        x += (tl.reshape(row, [N]),)
    if p_rotation is not None:
        rotated, x = rotate(x), ()
        for i in tl.static_range(16):
            x += (narrow(rotated[i]),)
    return x


@triton.jit
def _load_whole_pairs(p_x, first, i_pair, row_stride):
    """Like :func:`_load_pairs`, of blocks that are all there."""
    N: tl.constexpr = first.shape[0] * i_pair.shape[0]
    stride = tl.cast(row_stride // 2, tl.int64)
    p_tile = p_x.to(tl.pointer_type(tl.int32))
    p_tile += first.to(tl.int64)[:, None] * stride + i_pair[None, :]
    pairs = ()
    for i in tl.static_range(16):
        pairs += (tl.reshape(tl.load(p_tile + i * stride), [N]),)
    return pairs


@triton.jit
def _load_pairs(p_x, first, end, i_pair, row_stride, columns):
    """The 16 rows of blocks as pairs of neighbours of a row."""
    N: tl.constexpr = first.shape[0] * i_pair.shape[0]
    stride = tl.cast(row_stride // 2, tl.int64)
    p_tile = p_x.to(tl.pointer_type(tl.int32))
    p_tile += first.to(tl.int64)[:, None] * stride + i_pair[None, :]
    pairs = ()
    for i in tl.static_range(16):
        mask = (first + i < end)[:, None] & (i_pair < columns // 2)[None, :]
        row = tl.load(p_tile + i * stride, mask=mask, other=0)
        pairs += (tl.reshape(row, [N]),)
    return pairs


@triton.jit
def _rotate_pairs(pairs):
    """Both values of pairs rotated down their columns, and rounded."""
    lower, upper = (), ()
    for i in tl.static_range(16):
        lower += (low_half(pairs[i]),)
        upper += (high_half(pairs[i]),)
    lower, upper = rotate(lower), rotate(upper)
    pairs = ()
    for i in tl.static_range(16):
        pairs += (narrow_pair(lower[i], upper[i]),)
    return pairs


@triton.jit
def _overs(p_amax, group, groups, i_column, columns, group_stride):
    """The factors over all blocks and their inverses, for lower and upper columns of pairs."""
    NB: tl.constexpr = group.shape[0]
    BK: tl.constexpr = i_column.shape[0]
    if group_stride is None:
        over_all = over_all_of(tl.load(p_amax + tl.minimum(group, groups - 1)))
        inverse = _of_pairs(inverse_of(over_all), BK // 2)
        over_all = _of_pairs(over_all, BK // 2)
        overs, inverses = (over_all, over_all), (inverse, inverse)
    else:
        amax = load_column_amax(p_amax, group, groups, i_column, columns, group_stride)
        lower, upper = tl.split(tl.reshape(amax, [NB * BK // 2, 2]))
        overs = (over_all_of(lower), over_all_of(upper))
        inverses = (inverse_of(overs[0]), inverse_of(overs[1]))
    return overs, inverses


@triton.jit
def _of_pairs(value, BP: tl.constexpr):
    """What blocks have, for each of their pairs of columns."""
    NB: tl.constexpr = value.shape[0]
    return tl.reshape(tl.broadcast_to(value[:, None], [NB, BP]), [NB * BP])


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
    i_rows,
    i_chunk,
    NB: tl.constexpr,
    BK: tl.constexpr,
    V: tl.constexpr,
    WORDS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Codes of NB blocks of rows in BK columns, of which a thread gets V side by side."""
    seed = load_seed(p_seed)
    i_first = i_rows * NB
    i_block = i_first + tl.arange(0, NB)
    in_tail, whole, uneven = look_at_blocks(p_table, i_first, NB, groups, rows, blocks, width)
    first, end, group, prefix, width, before = locate_blocks(p_table, rows, width, i_block, blocks)
    i_column = tl.max_contiguous(i_chunk * BK + tl.arange(0, BK), V)
    m_column = i_column < columns
    o_scale = i_block.to(tl.int64)[:, None] * columns + i_column[None, :]
    m_scale = (i_block < blocks)[:, None] & m_column[None, :]
    if p_table is not None and in_tail:
        # The tail is not read: zeros have codes and a scale of zero.
        tl.store(p_scales + o_scale, tl.zeros([NB, BK], tl.uint8), mask=m_scale)
        place = place_of(prefix, before, width, i_column, columns)
        clear_blocks(p_codes, place, m_column[None, :], width)
    else:
        end = tl.where(group < groups, end, first)
        if PAIRS:
            i_pair = i_chunk * (BK // 2) + tl.arange(0, BK // 2)
            i_pair = tl.max_contiguous(i_pair, V // 2)
            # A rotation needs the registers that a second way of loading takes.
            if p_rotation is None and whole & (i_chunk * BK + BK <= columns):
                pairs = _load_whole_pairs(p_x, first, i_pair, row_stride)
            else:
                pairs = _load_pairs(p_x, first, end, i_pair, row_stride, columns)
            if p_rotation is not None:
                pairs = _rotate_pairs(pairs)
            overs, inverses = _overs(p_amax, group, groups, i_column, columns, amax_stride)
            i_pairs = i_block[:, None] * columns + 2 * i_pair[None, :]
            i_pairs = tl.reshape(i_pairs, [NB * BK // 2])
            codes = column_words(pairs, overs, inverses, seed, i_pairs)
            byte, words = tl.join(codes[0], codes[2]), ()
            for i in tl.static_range(2):
                words += (tl.reshape(tl.join(codes[1][i], codes[3][i]), [NB, BK]),)
        else:
            x = _load_blocks(p_x, first, end, i_column, row_stride, columns, p_rotation)
            amax = load_column_amax(p_amax, group, groups, i_column, columns, amax_stride)
            byte, multiplier = scales_of(x, amax, False, CANDIDATES)
            flat = words_of(x, multiplier, seed, tl.reshape(o_scale, [NB * BK]), 1)
            words = (tl.reshape(flat[0], [NB, BK]), tl.reshape(flat[1], [NB, BK]))
        byte = tl.reshape(byte, [NB, BK]).to(tl.uint8)
        tl.store(p_scales + o_scale, byte, mask=m_scale)
        place = place_of(prefix, before, width, i_column, columns)
        m_code = (before < width)[:, None] & m_column[None, :]
        # Groups of whole blocks lie at multiples of eight, though nobody promised it.
        if WORDS or uneven == 0:
            store_blocks(p_codes, place, words, m_code)
        else:
            parts = load_parts(p_table, i_block, blocks, width - before, before)
            store_shifted(p_codes, place, words, m_code, parts, PAIRS)


@triton.jit(do_not_specialize=["groups", "rows", "blocks"])
def _quantize_kernel(
    p_x,
    p_codes,
    p_scales,
    p_amax,
    p_rotation,
    p_seed,
    p_table,
    p_noop,
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
    PAIRS: tl.constexpr,
):
    if p_noop is not None and tl.load(p_noop) != 0:
        return
    i_rows = tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
    if i_rows * NB < blocks:
        down_columns(
            p_x, p_codes, p_scales, p_amax, p_rotation, p_seed, p_table, groups, rows, columns,
            blocks, width, row_stride, amax_stride, i_rows, tl.program_id(0), NB, BK, V, WORDS,
            CANDIDATES, PAIRS,
        )  # fmt: skip


def quantize_nvfp4_columns(
    x_MK: Tensor,
    amax: Tensor,
    ends_G: Tensor | None = None,
    rotation_BB: Tensor | None = None,
    seed: Tensor | None = None,
    *,
    four_over_six: bool = False,
    into: Into | None = None,
) -> tuple[Tensor, Tensor]:
    """Blocks down columns: transposed codes, flat, and E4M3 scales ``(S, K)``, both bytes.

    ``rotation_BB`` is ``hadamard_matrix``, whose signs are compiled into the kernel.
    """
    x_MK = unit_columns(x_MK)
    rows, columns = x_MK.shape
    multiple = row_multiple(rotation_BB)
    codes, scales_SK = new_columns(x_MK, ends_G, multiple) if into is None else into.buffers
    tile = column_tile(scales_SK)
    pairs = are_pairs(x_MK, 1 + four_over_six)
    if pairs and rotation_BB is None and seed is None:
        tile["maxnreg"] = _REGISTERS
    if scales_SK.numel():
        _quantize_kernel[column_grid(scales_SK, tile)](
            x_MK,
            codes,
            scales_SK,
            amax.contiguous(),
            rotation_BB,
            seed,
            column_table(ends_G, rows, multiple),
            noop_of(into),
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
            PAIRS=pairs,
        )
    return codes, scales_SK


def column_tile(scales_SK: Tensor) -> dict[str, Any]:
    """The constants of a launch."""
    BK = min(_COLUMNS, max(16, next_power_of_2(scales_SK.shape[1])))
    # No product may be added without having been rounded.
    return {
        "NB": BLOCKS.value,
        "BK": BK,
        "V": _COLUMNS_A_THREAD,
        "enable_fp_fusion": False,
    }
