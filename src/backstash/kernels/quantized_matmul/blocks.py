"""Products on float8 codes in blocks of 128: each block's product times its two scales.

The codes of a block are multiplied as they are, which is exact, and the block's sum is scaled
and added up in float32.  Hopper's float8 matrix unit keeps about 14 bits of a sum; over 128
products that is far below the rounding of the codes, over thousands it would not be.

The unit wants both operands with what is added up side by side in memory, and codes down
columns lie the other way round.  Of a weight they are transposed; of rows in groups they are
too, block by block, with zeros up to whole blocks.  That is a copy of bytes, not of values.

Letters: as in ``places``; a step is one block of J.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.blocks import block_count, block_table, group_number, locate_block
from backstash.kernels.quantized_matmul.places import (
    column_offsets,
    group_tile,
    load_codes,
    row_offsets,
    row_tile,
    store_tile,
    units_before,
)
from backstash.kernels.sizes import ceil_div

_WARPS = 8


@triton.jit
def _turn_kernel(p_codes, p_turned, p_table, groups, rows, columns, ld, B: tl.constexpr):
    """One block of B rows and B of its columns, transposed; zeros where it has no row."""
    i_block = tl.program_id(0) // tl.cdiv(columns, B)
    first, end, group = locate_block(p_table, rows, i_block, B)
    if (group < groups) & (first < end):
        i_row, i_column = tl.arange(0, B), tl.program_id(0) % tl.cdiv(columns, B) * B
        i_column += tl.arange(0, B)
        m_column = i_column < columns
        p_tile = p_codes + first.to(tl.int64) * ld + i_row[:, None] * ld + i_column[None, :]
        mask = (i_row < end - first)[:, None] & m_column[None, :]
        codes = tl.load(p_tile, mask=mask, other=0)
        p_tile = p_turned + tl.cast(i_block, tl.int64) * columns * B
        p_tile += i_column[:, None] * B + i_row[None, :]
        tl.store(p_tile, codes.T, mask=m_column[:, None])


@triton.jit
def _scales_of_b(p_scales, ld, m_n, TILES: tl.constexpr, B: tl.constexpr):
    """The scales of B lines for one step; all lie in one tile if there are tiles.

    Each is read twice: a load smaller than the program is repeated by every thread that needs
    one of its values, which would be a load for each column of the result.
    """
    if TILES:
        scales = tl.load(p_scales)
    else:
        o_line = tl.arange(0, B)[:, None] * ld + tl.zeros([1, 2], tl.int32)
        scales = tl.max(tl.load(p_scales + o_line, mask=m_n[:, None], other=0.0), 1)
    return scales


@triton.jit
def _add_scaled(total, product, a_scale, b_scale, TILES: tl.constexpr):
    if TILES:
        total += product * (a_scale * b_scale)[:, None]
    else:
        total += product * a_scale[:, None] * b_scale[None, :]
    return total


@triton.jit(do_not_specialize=["groups", "rows", "tiles"])
def block_mm_kernel(
    p_a,
    p_b,
    p_a_scales,
    p_b_scales,
    p_out,
    p_table,
    p_ends,
    groups,
    rows,
    length,
    M,
    columns,
    tiles,
    IS_DW: tl.constexpr,
    B_COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BG: tl.constexpr,
):
    """B_COLUMNS is of the scales of b, ``dx`` and ``dw``; codes are ``(C, J)`` in each group.

    For ``dw`` the codes of both are those of :func:`_turn_kernel`, ``(M, 128)`` in each block.
    """
    i_m, i_n, i_j = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, 128)
    for i_tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        if IS_DW:
            first, J, group, m0, n0 = group_tile(p_table, i_tile, rows, M, columns, BM, BN)
            J = tl.cdiv(J, 128) * 128  # the last block is filled up with zeros
            block = units_before(p_ends, rows, group, 128, BG)
            _, o_a_scale = column_offsets(first, block, m0, M, False, 128)
            _, o_b_scale = column_offsets(first, block, n0, columns, TILES, 128)
            o_a, o_b = (block * M + m0) * 128, (block * columns + n0) * 128
            o_out = (tl.cast(group, tl.int64) * M + m0) * columns + n0
            left = M - m0
            m_m = i_m < left
            a_ld, b_ld = 128, 128
            a_step, b_step = 128 * M, 128 * columns
            a_scale_ld, a_scale_step = 1, M
        else:
            first, left, group, n0, J = row_tile(
                p_table, i_tile, groups, rows, length, columns, BM, BN
            )
            o_a, o_a_scale = row_offsets(first, first, length, False, 128)
            block = group * tl.cdiv(columns, 128) + n0 // 128
            o_b, o_b_scale = row_offsets(group * columns + n0, block, length, TILES, 128)
            if B_COLUMNS:
                block = group * tl.cdiv(length, 128)
                _, o_b_scale = column_offsets(group * length, block, n0, columns, TILES, 128)
            o_out = first * columns + n0
            # The tail is written and never read.
            m_m = i_m < tl.where(J > 0, left, 0)
            a_ld, b_ld = length, length
            a_step, b_step = 128, 128
            a_scale_ld, a_scale_step = tl.cdiv(length, 128), 1
        m_n = i_n < columns - n0
        if B_COLUMNS:
            b_scale_ld, b_scale_step = 1, tl.cdiv(columns, 128) if TILES else columns
        else:
            b_scale_ld, b_scale_step = tl.cdiv(length, 128), 1
        p_a_codes, p_a_scale = p_a + o_a, p_a_scales + o_a_scale
        p_b_codes, p_b_scale = p_b + o_b, p_b_scales + o_b_scale
        a_scale = tl.load(p_a_scale + i_m * a_scale_ld, mask=m_m, other=0.0)
        b_scale = _scales_of_b(p_b_scale, b_scale_ld, m_n, TILES, BN)
        total = tl.zeros([BM, BN], tl.float32)
        for j in range(0, J, 128):
            # The next scales are on their way meanwhile; after the last block, its own again.
            is_last = J - j <= 128
            p_a_scale += tl.where(is_last, 0, a_scale_step)
            p_b_scale += tl.where(is_last, 0, b_scale_step)
            a_next = tl.load(p_a_scale + i_m * a_scale_ld, mask=m_m, other=0.0)
            a = load_codes(p_a_codes, a_ld, m_m, i_j < J - j, False, BM, 128)
            b = load_codes(p_b_codes, b_ld, m_n, i_j < J - j, False, BN, 128)
            product = tl.dot(a, b.T)
            p_a_codes += a_step
            p_b_codes += b_step
            b_next = _scales_of_b(p_b_scale, b_scale_ld, m_n, TILES, BN)
            total = _add_scaled(total, product, a_scale, b_scale, TILES)
            a_scale, b_scale = a_next, b_next
        store_tile(p_out + o_out, columns, i_m < left, m_n, total, BM, BN)


def turn_blocks(codes_MK: Tensor, ends_G: Tensor | None) -> Tensor:
    """Codes ``(S, K, 128)`` of blocks of 128 rows, which start anew in every group, transposed.

    A block's missing rows are zeros; blocks that no group uses are left as they are.
    """
    rows, columns = codes_MK.shape
    blocks = block_count(rows, ends_G, 128)
    turned_SKB = torch.empty(blocks, columns, 128, dtype=torch.uint8, device=codes_MK.device)
    programs = blocks * ceil_div(columns, 128)
    tile: dict[str, Any] = {"B": 128, "num_warps": _WARPS}
    if programs:
        _turn_kernel[(programs,)](
            codes_MK.view(torch.uint8),
            turned_SKB,
            block_table(ends_G, rows, 128),
            group_number(ends_G),
            rows,
            columns,
            codes_MK.stride(0),
            **tile,
        )
    return turned_SKB.view(codes_MK.dtype)
