"""Products of rows on NVFP4 codes on a Hopper GPU, decoded while the tensor cores multiply.

The same sums as in ``nvfp4``, for ``y`` and ``dx``: a code times its block's scale is a bfloat16
exactly, and the scale above the blocks multiplies the sum.  Half a byte a value is so little
that what the step after next needs is loaded into registers, without a detour.

Letters: as in ``places``; BK values of J are multiplied in a step, P = BK / 2 bytes.
"""

# Gluon's annotations do not say what its compiler takes.
# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from backstash.kernels.quantized_matmul.hopper import row_place, store_sums, wait_for_all

_PER_AMAX = gl.constexpr(1.0 / 2688.0)


@gluon.jit
def _tile(layout: gl.constexpr, ld, rows, R: gl.constexpr, P: gl.constexpr):
    """Where a tile of pairs lies, which of its rows there are, and its columns."""
    i_row = gl.arange(0, R, layout=gl.SliceLayout(1, layout)).expand_dims(1)
    i_pair = gl.arange(0, P, layout=gl.SliceLayout(0, layout)).expand_dims(0)
    return i_row * ld + i_pair, i_row, i_row < rows, i_pair


@gluon.jit
def _scales(
    values: gl.constexpr, line_ld, step_ld, left, TURN, SPAN, R: gl.constexpr, C: gl.constexpr
):
    """Where the scales of a tile of values ``(R, C)`` lie, beside the values; SPAN lines share."""
    if TURN:
        beside = gl.zeros([R, C], gl.int8, values).reshape([R // 16, 16, C])
        tile: gl.constexpr = gl.SliceLayout(1, beside.type.layout)
        i_s = gl.arange(0, R // 16, layout=gl.SliceLayout(1, tile)).expand_dims(1)
        i_line = gl.arange(0, C, layout=gl.SliceLayout(0, tile)).expand_dims(0)
    else:
        beside = gl.zeros([R, C], gl.int8, values).reshape([R, C // 16, 16])
        tile: gl.constexpr = gl.SliceLayout(2, beside.type.layout)
        i_s = gl.arange(0, C // 16, layout=gl.SliceLayout(0, tile)).expand_dims(0)
        i_line = gl.arange(0, R, layout=gl.SliceLayout(1, tile)).expand_dims(1)
    return i_line // SPAN * line_ld + i_s * step_ld, i_line < left, i_s


@gluon.jit
def _decode(pairs, scales, TURN: gl.constexpr):
    """The tile in bfloat16; a scale has 16 values of a row, or of a column."""
    R: gl.constexpr = pairs.shape[0]
    C: gl.constexpr = pairs.shape[1] * 2
    codes = gl.fp4_to_fp(pairs, gl.bfloat16, axis=1)
    factor = scales.to(gl.float8e4nv, bitcast=True).to(gl.float32).to(gl.bfloat16)
    if TURN:
        values = codes.reshape([R // 16, 16, C]) * factor.expand_dims(1)
    else:
        values = codes.reshape([R, C // 16, 16]) * factor.expand_dims(2)
    return values.reshape([R, C])


@gluon.jit
def _over_all(p_amax, group, o_lines, m_lines, LINES: gl.constexpr):
    amax = gl.load(p_amax + o_lines, mask=m_lines, other=0.0) if LINES else gl.load(p_amax + group)
    return amax * _PER_AMAX


@gluon.jit
def _load(p_a, p_b, p_a_scales, p_b_scales, places, J, length, TURN: gl.constexpr):
    """Pairs and scales of a step; J pairs and ``length`` values are left."""
    a_tile, b_tile, a_scales, b_scales, m_n = places
    o_a, _, m_a, a_pair = a_tile
    o_b, b_row, m_b, b_pair = b_tile
    o_as, m_as, a_s = a_scales
    o_bs, m_bs, b_s = b_scales
    a = gl.load(p_a + o_a, mask=m_a & (a_pair < J), other=0)
    if TURN:
        b = gl.load(p_b + o_b, mask=(b_row < length) & m_n, other=0)
    else:
        b = gl.load(p_b + o_b, mask=m_b & (b_pair < J), other=0)
    blocks = (J + 7) // 8
    a_scale = gl.load(p_a_scales + o_as, mask=m_as & (a_s < blocks), other=0)
    b_scale = gl.load(p_b_scales + o_bs, mask=m_bs & (b_s < blocks), other=0)
    return a, b, a_scale, b_scale


@gluon.jit(do_not_specialize=["groups", "rows", "tiles"])
def hopper_nvfp4_kernel(
    p_a,
    p_b,
    p_a_scales,
    p_b_scales,
    p_a_amax,
    p_b_amax,
    p_out,
    p_table,
    groups,
    rows,
    length,
    M,
    columns,
    tiles,
    pairs,
    column_pairs,
    B_COLUMNS: gl.constexpr,
    TILES: gl.constexpr,
    A_LINES: gl.constexpr,
    B_LINES: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
):
    """Blocks of b lie down columns for ``dx``; b may be in tiles, whose bytes pair columns then."""
    W: gl.constexpr = gl.num_warps()
    P: gl.constexpr = BK // 2
    S: gl.constexpr = BK // 16
    TURN: gl.constexpr = B_COLUMNS and TILES
    SPAN: gl.constexpr = 16 if TILES else 1
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, BN, 16])
    along: gl.constexpr = gl.BlockedLayout([1, 16], [16, 2], [W, 1], [1, 0])
    down: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [W * 64 // BN, BN // 64], [1, 0])
    a_values: gl.constexpr = gl.BlockedLayout([1, 32], [16, 2], [W, 1], [1, 0])
    down_values: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [W * 64 // BN, BN // 64], [1, 0])
    b_layout: gl.constexpr = down if TURN else along
    b_values: gl.constexpr = down_values if TURN else a_values
    R: gl.constexpr = BK if TURN else BN
    C: gl.constexpr = BN if TURN else BK
    a_smem = gl.allocate_shared_memory(
        gl.bfloat16, [2, BM, BK], gl.NVMMASharedLayout.get_default_for([BM, BK], gl.bfloat16)
    )
    b_smem = gl.allocate_shared_memory(
        gl.bfloat16, [2, R, C], gl.NVMMASharedLayout.get_default_for([R, C], gl.bfloat16)
    )
    sizes = (groups, rows, pairs, M, columns, tiles)
    blocks, chunks = (length + 15) // 16, (columns + SPAN - 1) // SPAN
    i = gl.program_id(0) * 0
    for i_tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first, left, group, n0, J = row_place(p_table, i_tile, sizes, BM, BN)
        first64, group64 = first.to(gl.int64), group.to(gl.int64)
        a_tile = _tile(along, pairs, left, BM, P)
        a_scales = _scales(a_values, blocks, 1, left, False, 1, BM, BK)
        if TURN:
            b_tile = _tile(b_layout, column_pairs, BK, R, BN // 2)
            o_b, b_step = group64 * length * column_pairs + n0 // 2, BK * column_pairs
            m_n = b_tile[3] < column_pairs - n0 // 2
        else:
            b_tile = _tile(b_layout, pairs, columns - n0, R, P)
            o_b, b_step = (group64 * columns + n0) * pairs, P
            m_n = b_tile[2]
        if B_COLUMNS:
            b_scales = _scales(b_values, 1, chunks, columns - n0, TURN, SPAN, R, C)
            o_bs, bs_step = group64 * blocks * chunks + n0 // SPAN, S * chunks
        else:
            b_scales = _scales(b_values, blocks, 1, columns - n0, TURN, SPAN, R, C)
            o_bs, bs_step = (group64 * chunks + n0 // SPAN) * blocks, S
        places = (a_tile, b_tile, a_scales, b_scales, m_n)
        p_a_at, p_b_at = p_a + first64 * pairs, p_b + o_b
        p_as_at, p_bs_at = p_a_scales + first64 * blocks, p_b_scales + o_bs
        ahead = _load(p_a_at, p_b_at, p_as_at, p_bs_at, places, J, length, TURN)
        total = gl.zeros([BM, BN], gl.float32, acc)
        if J > 0:
            a_smem.index(i % 2).store(_decode(ahead[0], ahead[2], False))
            b_smem.index(i % 2).store(_decode(ahead[1], ahead[3], TURN))
            p_a_at += P
            p_b_at += b_step
            p_as_at += S
            p_bs_at += bs_step
            ahead = _load(p_a_at, p_b_at, p_as_at, p_bs_at, places, J - P, length - BK, TURN)
            fence_async_shared()
            wait_for_all()
        for j in range(0, J, P):
            b = b_smem.index(i % 2) if TURN else b_smem.index(i % 2).permute((1, 0))
            running = warpgroup_mma(a_smem.index(i % 2), b, total, use_acc=j > 0, is_async=True)
            i += 1
            if j + P < J:
                p_a_at += P
                p_b_at += b_step
                p_as_at += S
                p_bs_at += bs_step
                rest = J - j - 2 * P
                now = ahead
                ahead = _load(
                    p_a_at, p_b_at, p_as_at, p_bs_at, places, rest, length - 2 * j - 2 * BK, TURN
                )
                a_smem.index(i % 2).store(_decode(now[0], now[2], False))
                b_smem.index(i % 2).store(_decode(now[1], now[3], TURN))
                fence_async_shared()
            total = warpgroup_mma_wait(0, deps=(running,))
            wait_for_all()
        i_m = gl.arange(0, BM, layout=gl.SliceLayout(1, acc))
        i_n = gl.arange(0, BN, layout=gl.SliceLayout(0, acc))
        a_over = _over_all(p_a_amax, group, first64 + i_m, i_m < left, A_LINES)
        b_over = _over_all(
            p_b_amax, group, group64 * columns + n0 + i_n, i_n < columns - n0, B_LINES
        )
        total *= a_over.expand_dims(1) if A_LINES else a_over
        total *= b_over.expand_dims(0) if B_LINES else b_over
        # Nothing times an infinite scale is nothing.
        total = gl.where(J > 0, total, 0.0)
        store_sums(p_out + first64 * columns + n0, columns, left, columns - n0, total, BM, BN)
