"""Products on NVFP4 codes: four bits and a block's scale become a bfloat16 as they are loaded.

A code has two significant bits and a block's E4M3 scale four, so their product is a bfloat16
exactly.  The float32 scale above the blocks is the same for all that is added up, so it is left
out of the sum and multiplies it once.  Rows that were mixed by the Hadamard transform on both
sides need not be unmixed: the transform is orthogonal, and the product is that of the rows.

Codes down columns are transposed group by group, two rows a byte, so what is added up is side
by side in memory as it is along rows.  Only a weight in tiles keeps its order; its bytes are
pairs of columns.

Letters: as in ``places``, but J counts pairs of values; BK values are multiplied in a step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from backstash.kernels.quantized_matmul.places import (
    group_tile,
    load_scales,
    row_tile,
    store_tile,
    units_before,
)

# What brings an amax to the scale above the blocks, 1 / (448 * 6), and a code read as E4M3 to
# its value: the exponent of E2M1 is biased by 1, that of E4M3 by 7.
_PER_AMAX = tl.constexpr(1.0 / 2688.0)
_PER_CODE = tl.constexpr(64.0)


@triton.jit
def _load_pairs(p_codes, ld, m_row, m_pair, R: tl.constexpr, P):
    """R rows of P pairs."""
    o_tile = tl.arange(0, R)[:, None] * ld + tl.arange(0, P)[None, :]
    return tl.load(p_codes + o_tile, mask=m_row[:, None] & m_pair[None, :], other=0)


@triton.jit
def _codes(pairs, R: tl.constexpr, P):
    """What R rows of P pairs stand for, ``(R, 2 P)`` in float32, but for a factor."""
    low = ((pairs & 8) << 4) | ((pairs & 7) << 2)
    high = (pairs & 0x80) | ((pairs & 0x70) >> 2)
    return tl.join(low, high).reshape(R, 2 * P).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _values(pairs, scales, TURN, R: tl.constexpr, P: tl.constexpr):
    """The tile in bfloat16, ``(R, 2 P)``, but for a factor; a scale has 16 of a row or column."""
    codes = _codes(pairs, R, P)
    factor = scales.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if TURN:
        values = codes.reshape(R // 16, 16, 2 * P) * factor[:, None, :]
    else:
        values = codes.reshape(R, P // 8, 16) * factor[:, :, None]
    return values.to(tl.bfloat16).reshape(R, 2 * P)


@triton.jit
def _last_rows(p_codes, p_scales, ld, m_line, rest, p_rotation, B: tl.constexpr):
    """The rows of a last block that is not full, unmixed, ``(B, 16)``, and their scales.

    Mixing filled the block up with zeros; unmixed codes have something there, which is not part
    of the matrix.  A sum of sixteen codes is a bfloat16 exactly as long as it is not scaled.
    """
    mixed = _codes(_load_pairs(p_codes, ld, m_line, tl.arange(0, 8) < 8, B, 8), B, 8)
    i_row = tl.arange(0, 16)
    rotation = tl.load(p_rotation + i_row[:, None] * 16 + i_row[None, :])
    rows = tl.dot(mixed.to(tl.bfloat16), rotation.T)
    rows = tl.where((i_row < rest)[None, :], rows, 0.0).to(tl.bfloat16)
    scales = tl.load(p_scales + tl.arange(0, B), mask=m_line, other=0)
    return rows, scales.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _over_all(p_amax, group, line, m_line, LINES: tl.constexpr):
    """The scale above the blocks, of a group or of each line, and what a code lacks."""
    amax = tl.load(p_amax + line, mask=m_line, other=0.0) if LINES else tl.load(p_amax + group)
    return amax * _PER_AMAX * _PER_CODE


@triton.jit(do_not_specialize=["groups", "rows", "tiles"])
def nvfp4_mm_kernel(
    p_a,
    p_b,
    p_a_scales,
    p_b_scales,
    p_a_amax,
    p_b_amax,
    p_out,
    p_table,
    p_ends,
    p_rotation,
    groups,
    rows,
    length,
    M,
    columns,
    tiles,
    pairs,
    column_pairs,
    IS_DW: tl.constexpr,
    B_COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    A_LINES: tl.constexpr,
    B_LINES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BG: tl.constexpr,
):
    """Blocks of b lie down columns for ``dx``, those of both for ``dw``; b may be in tiles.

    LINES have an amax each.  ``pairs`` hold the ``length`` values of a row, ``column_pairs``
    those of a row of the result.  With a rotation the rows of ``dw`` were mixed in blocks.
    """
    S: tl.constexpr = BK // 16
    P: tl.constexpr = BK // 2
    TURN: tl.constexpr = B_COLUMNS and TILES
    SPAN = 16 if TILES else 1
    MULTIPLE = 2 if p_rotation is None else 16
    i_m, i_n, i_s = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, S)
    for i_tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        if IS_DW:
            _, count, group, m0, n0 = group_tile(p_table, i_tile, rows, M, columns, BM, BN)
            before = units_before(p_ends, rows, group, MULTIPLE, BG) * (MULTIPLE // 2)
            block = units_before(p_ends, rows, group, 16, BG)
            group = tl.cast(group, tl.int64)
            ld = tl.cdiv(count, MULTIPLE) * (MULTIPLE // 2)
            J = ld if p_rotation is None else count // 16 * 8
            b_ld, line = ld, group * M + m0
            o_a, o_a_scale = before * M + tl.cast(m0, tl.int64) * ld, block * M + m0
            o_b, o_b_scale = before * columns + tl.cast(n0, tl.int64) * ld, block * columns + n0
            a_line_ld, a_step_ld, b_line_ld, b_step_ld = 1, M, 1, columns
            o_out = line * columns + n0
            left = M - m0
            m_m = i_m < left
        else:
            line, left, group, n0, J = row_tile(
                p_table, i_tile, groups, rows, pairs, columns, BM, BN
            )
            ld = pairs
            blocks = tl.cdiv(length, 16)
            o_a, o_a_scale = line * ld, line * blocks
            a_line_ld, a_step_ld = blocks, 1
            if B_COLUMNS:
                b_line_ld = 1
                b_ld = column_pairs if TILES else ld
                b_step_ld = tl.cdiv(columns, 16) if TILES else columns
                o_b = group * length * b_ld + n0 // 2 if TILES else (group * columns + n0) * ld
                o_b_scale = group * blocks * b_step_ld + n0 // SPAN
            else:
                b_ld, b_line_ld, b_step_ld = ld, blocks, 1
                o_b = (group * columns + n0) * ld
                o_b_scale = (group * tl.cdiv(columns, SPAN) + n0 // SPAN) * blocks
            o_out = line * columns + n0
            count = J
            # The tail is written and never read.
            m_m = i_m < tl.where(J > 0, left, 0)
        m_n = i_n < columns - n0
        a_over_all = _over_all(p_a_amax, group, line + i_m, m_m, A_LINES)
        b_over_all = _over_all(p_b_amax, group, group * columns + n0 + i_n, m_n, B_LINES)
        p_a_codes, p_a_scale = p_a + o_a, p_a_scales + o_a_scale
        p_b_codes, p_b_scale = p_b + o_b, p_b_scales + o_b_scale
        m_s = i_s < tl.cdiv(J, 8)
        a_scale = load_scales(p_a_scale, a_line_ld, a_step_ld, m_m, m_s, False, 1, BM, S)
        b_scale = load_scales(p_b_scale, b_line_ld, b_step_ld, m_n, m_s, TURN, SPAN, BN, S)
        total = tl.zeros([BM, BN], tl.float32)
        for j in range(0, J, P):
            m_pair = tl.arange(0, P) < J - j
            a = _load_pairs(p_a_codes, ld, m_m, m_pair, BM, P)
            if TURN:
                m_j = tl.arange(0, BK) < length - 2 * j
                m_pair_n = tl.arange(0, BN // 2) < column_pairs - n0 // 2
                b = _load_pairs(p_b_codes, b_ld, m_j, m_pair_n, BK, BN // 2)
                p_b_codes += BK * b_ld
            else:
                b = _load_pairs(p_b_codes, b_ld, m_n, m_pair, BN, P)
                p_b_codes += P
            p_a_codes += P
            p_a_scale += S * a_step_ld
            p_b_scale += S * b_step_ld
            m_s = i_s < tl.cdiv(J - j - P, 8)
            a_next = load_scales(p_a_scale, a_line_ld, a_step_ld, m_m, m_s, False, 1, BM, S)
            b_next = load_scales(p_b_scale, b_line_ld, b_step_ld, m_n, m_s, TURN, SPAN, BN, S)
            a = _values(a, a_scale, False, BM, P)
            b = _values(b, b_scale, TURN, BK if TURN else BN, BN // 2 if TURN else P)
            total = tl.dot(a, b if TURN else b.T, total)
            a_scale, b_scale = a_next, b_next
        if p_rotation is not None:
            rest = count % 16
            if rest > 0:
                p_a_last, p_a_scale = p_a + o_a + J, p_a_scales + o_a_scale + J // 8 * M
                p_b_last, p_b_scale = p_b + o_b + J, p_b_scales + o_b_scale + J // 8 * columns
                a, a_last = _last_rows(p_a_last, p_a_scale, ld, m_m, rest, p_rotation, BM)
                b, b_last = _last_rows(p_b_last, p_b_scale, ld, m_n, rest, p_rotation, BN)
                total += tl.dot(a, b.T) * a_last[:, None] * b_last[None, :]
        total *= a_over_all[:, None] if A_LINES else a_over_all
        total *= b_over_all[None, :] if B_LINES else b_over_all
        # Nothing times an infinite scale is nothing.
        total = tl.where(count > 0, total, 0.0)
        store_tile(p_out + o_out, columns, i_m < left, m_n, total, BM, BN)
