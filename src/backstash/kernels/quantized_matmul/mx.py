"""Products on MXFP8 codes: dequantized to bfloat16 between the load and the matrix unit.

Hopper has no matrix unit for blocks of 32.  An E4M3 code times a power of two is a bfloat16
exactly, so the products are those of the dequantized values and only their sum, in float32,
rounds.  (A value below 2^-133, which bfloat16 cannot hold, is rounded to a multiple of that.)
What is read is one byte a value; the bfloat16 tile lives in registers and shared memory only.

The scales of the next step are loaded before the present one is multiplied: they are too small
for the copies to shared memory that codes travel by, and would be waited for otherwise.

Letters: as in ``places``; BK of J are multiplied in a step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from backstash.kernels.cast.exponents import factor_of
from backstash.kernels.quantized_matmul.places import (
    column_offsets,
    group_tile,
    load_codes,
    load_scales,
    row_offsets,
    row_tile,
    store_tile,
    units_before,
)


@triton.jit
def _values(codes, exponents, COLUMNS: tl.constexpr, B: tl.constexpr, BK: tl.constexpr):
    """The tile in bfloat16, ``(B, BK)`` or ``(BK, B)``."""
    factor = factor_of(exponents.to(tl.int32))
    # Through float32: the direct conversion to bfloat16 is four times as slow.
    if COLUMNS:
        values = codes.to(tl.float32).reshape(BK // 32, 32, B) * factor[:, None, :]
        tile = values.to(tl.bfloat16).reshape(BK, B)
    else:
        values = codes.to(tl.float32).reshape(B, BK // 32, 32) * factor[:, :, None]
        tile = values.to(tl.bfloat16).reshape(B, BK)
    return tile


@triton.jit(do_not_specialize=["groups", "rows", "tiles"])
def mx_mm_kernel(
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
    BK: tl.constexpr,
    BG: tl.constexpr,
):
    """Blocks of b lie down columns for ``dx``, those of both for ``dw``; b may be in tiles."""
    S: tl.constexpr = BK // 32
    SPAN = 32 if TILES else 1
    i_m, i_n, i_j, i_s = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK), tl.arange(0, S)
    for i_tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        if IS_DW:
            first, J, group, m0, n0 = group_tile(p_table, i_tile, rows, M, columns, BM, BN)
            block = units_before(p_ends, rows, group, 32, BG)
            first = tl.cast(first, tl.int64)
            o_a, o_a_scale = column_offsets(first, block, m0, M, False, 32)
            o_b, o_b_scale = column_offsets(first, block, n0, columns, TILES, 32)
            o_out = (tl.cast(group, tl.int64) * M + m0) * columns + n0
            left = M - m0
            m_m = i_m < left
            a_ld, a_line_ld, a_step_ld = M, 1, M
        else:
            first, left, group, n0, J = row_tile(
                p_table, i_tile, groups, rows, length, columns, BM, BN
            )
            o_a, o_a_scale = row_offsets(first, first, length, False, 32)
            if B_COLUMNS:
                block = group * tl.cdiv(length, 32)
                o_b, o_b_scale = column_offsets(group * length, block, n0, columns, TILES, 32)
            else:
                block = group * tl.cdiv(columns, 32) + n0 // 32
                o_b, o_b_scale = row_offsets(group * columns + n0, block, length, TILES, 32)
            o_out = first * columns + n0
            # The tail is written and never read.
            m_m = i_m < tl.where(J > 0, left, 0)
            a_ld, a_line_ld, a_step_ld = length, tl.cdiv(length, 32), 1
        m_n = i_n < columns - n0
        if B_COLUMNS:
            b_ld, b_line_ld, b_step_ld = columns, 1, tl.cdiv(columns, 32) if TILES else columns
        else:
            b_ld, b_line_ld, b_step_ld = length, tl.cdiv(length, 32), 1
        a_step = BK * a_ld if IS_DW else BK
        b_step = BK * b_ld if B_COLUMNS else BK
        p_a_codes, p_a_scale = p_a + o_a, p_a_scales + o_a_scale
        p_b_codes, p_b_scale = p_b + o_b, p_b_scales + o_b_scale
        m_s = i_s < tl.cdiv(J, 32)
        a_scale = load_scales(p_a_scale, a_line_ld, a_step_ld, m_m, m_s, IS_DW, 1, BM, S)
        b_scale = load_scales(p_b_scale, b_line_ld, b_step_ld, m_n, m_s, B_COLUMNS, SPAN, BN, S)
        total = tl.zeros([BM, BN], tl.float32)
        for j in range(0, J, BK):
            m_j = i_j < J - j
            a = load_codes(p_a_codes, a_ld, m_m, m_j, IS_DW, BM, BK)
            b = load_codes(p_b_codes, b_ld, m_n, m_j, B_COLUMNS, BN, BK)
            p_a_codes += a_step
            p_b_codes += b_step
            p_a_scale += S * a_step_ld
            p_b_scale += S * b_step_ld
            m_s = i_s < tl.cdiv(J - j - BK, 32)
            a_next = load_scales(p_a_scale, a_line_ld, a_step_ld, m_m, m_s, IS_DW, 1, BM, S)
            b_next = load_scales(p_b_scale, b_line_ld, b_step_ld, m_n, m_s, B_COLUMNS, SPAN, BN, S)
            a = _values(a, a_scale, IS_DW, BM, BK)
            b = _values(b, b_scale, B_COLUMNS, BN, BK)
            total = tl.dot(a.T if IS_DW else a, b if B_COLUMNS else b.T, total)
            a_scale, b_scale = a_next, b_next
        store_tile(p_out + o_out, columns, i_m < left, m_n, total, BM, BN)
