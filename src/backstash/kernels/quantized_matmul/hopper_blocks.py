"""Products on float8 codes in blocks of 128 on a Hopper GPU, with scales added on meanwhile.

The same sums as in ``blocks``: each block's product, times its two scales, is added up in
float32.  Here the tensor cores have the next block by then.  Two blocks make a round, so that
their products take turns in two sets of registers and nothing is copied; where their number is
odd, the last of a tile reads zeros.

Letters: as in ``places``.
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
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from backstash.kernels.quantized_matmul.hopper import (
    group_place,
    new_ring,
    row_place,
    store_sums,
    tile_place,
    units_before,
    wait_for_all,
)
from backstash.kernels.warpgroups import async_load

# A row of an operand that is past the end of every matrix: it is read as zeros.
_NO_ROW = gl.constexpr(0x7FFFFF00)


@gluon.jit
def _fetch(descs, ring, cursor, p_table, p_ends, sizes, IS_DW: gl.constexpr, BG: gl.constexpr):
    """Ask for the next block, of this tile or of the next that adds up anything.

    The cursor: the next tile, blocks left of this one, whether their number is odd, where the
    next lies in both operands, and how many have been asked for.
    """
    a_desc, b_desc = descs
    a_smem, b_smem, full = ring
    STAGES: gl.constexpr = a_smem.shape[0]
    BM: gl.constexpr = a_smem.shape[1]
    BN: gl.constexpr = b_smem.shape[1]
    i_tile, left, is_odd, row_a, row_b, k, i = cursor
    _, rows, _, M, columns, tiles = sizes
    while (left == 0) & (i_tile < tiles):
        if IS_DW:
            _, J, group, m0, n0 = group_place(p_table, i_tile, sizes, BM, BN)
            block = units_before(p_ends, rows, group, 128, BG)
            row_a, row_b = block * M + m0, block * columns + n0
        else:
            row_a, _, group, n0, J = row_place(p_table, i_tile, sizes, BM, BN)
            row_b = group * columns + n0
        left = (J + 127) // 128
        is_odd = left % 2
        left += is_odd
        k *= 0
        i_tile += gl.num_programs(0)
    more = left > 0
    is_none = (left == 1) & (is_odd == 1)
    bar = full.index(i % STAGES)
    mbarrier.expect(bar, (BM + BN) * 128, pred=more)
    place_a = [gl.where(is_none, _NO_ROW, row_a), k]
    place_b = [gl.where(is_none, _NO_ROW, row_b), k]
    async_load(a_desc, place_a, bar, a_smem.index(i % STAGES), pred=more)
    async_load(b_desc, place_b, bar, b_smem.index(i % STAGES), pred=more)
    if IS_DW:
        row_a += M
        row_b += columns
    else:
        k += 128
    return i_tile, left - more.to(gl.int32), is_odd, row_a, row_b, k, i + more.to(gl.int32)


@gluon.jit
def _add_scaled(total, product, a_scale, b_scale, TILES: gl.constexpr):
    acc: gl.constexpr = total.type.layout
    if TILES:
        total += product * (a_scale * b_scale).expand_dims(1)
    else:
        b_scale = gl.convert_layout(b_scale, gl.SliceLayout(0, acc))
        total += product * a_scale.expand_dims(1) * b_scale.expand_dims(0)
    return total


@gluon.jit
def _add_block(
    descs,
    ring,
    cursor,
    i,
    scales,
    state,
    p_table,
    p_ends,
    sizes,
    IS_DW: gl.constexpr,
    TILES: gl.constexpr,
    BG: gl.constexpr,
):
    """Multiply the i-th block; meanwhile scale and add the one before."""
    a_smem, b_smem, full = ring
    p_a_scale, p_b_scale, m_m, m_n = scales
    total, before, a_scale, b_scale = state
    STAGES: gl.constexpr = a_smem.shape[0]
    BM: gl.constexpr = a_smem.shape[1]
    BN: gl.constexpr = b_smem.shape[1]
    acc: gl.constexpr = total.type.layout
    a_next = gl.load(p_a_scale, mask=m_m, other=0.0)
    b_next = gl.load(p_b_scale, mask=m_n, other=0.0)
    mbarrier.wait(full.index(i % STAGES), i // STAGES & 1)
    product = gl.zeros([BM, BN], gl.float32, acc)
    a, b = a_smem.index(i % STAGES), b_smem.index(i % STAGES).permute((1, 0))
    product = warpgroup_mma(a, b, product, use_acc=False, is_async=True)
    # Everybody has waited for the block before: its place is free.
    wait_for_all()
    cursor = _fetch(descs, ring, cursor, p_table, p_ends, sizes, IS_DW, BG)
    total = _add_scaled(total, before, a_scale, b_scale, TILES)
    # The sum is named here only so that it is not put off until after the wait.
    product, total = warpgroup_mma_wait(0, deps=(product, total))
    return cursor, (total, product, a_next, b_next)


@gluon.jit(do_not_specialize=["groups", "rows", "tiles"])
def hopper_block_kernel(
    a_desc,
    b_desc,
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
    IS_DW: gl.constexpr,
    B_COLUMNS: gl.constexpr,
    TILES: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    BG: gl.constexpr,
):
    """B_COLUMNS is of the scales of b, ``dx`` and ``dw``; codes are ``(C, J)`` in each group.

    For ``dw`` the codes of both are those of ``turn_blocks``, ``(M, 128)`` in each block.
    """
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BN, 32])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BM, 128], a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BN, 128], b_desc.layout)
    descs, ring = (a_desc, b_desc), (a_smem, b_smem, new_ring(STAGES))
    fence_async_shared()
    sizes = (groups, rows, length, M, columns, tiles)
    i = gl.program_id(0) * 0
    cursor = (gl.program_id(0), i, i, i, i, i, i)
    for _ in range(STAGES - 1):
        cursor = _fetch(descs, ring, cursor, p_table, p_ends, sizes, IS_DW, BG)
    i_m = gl.arange(0, BM, layout=gl.SliceLayout(1, acc))
    i_n = gl.arange(0, BN, layout=line)
    blocks, chunks = (length + 127) // 128, (columns + 127) // 128
    for i_tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first, left, group, n0, J, scale_row, o_out = tile_place(
            p_table, p_ends, i_tile, sizes, blocks, IS_DW, 128, BM, BN, BG
        )
        if IS_DW:
            o_a, a_step = scale_row * M + first + i_m, M
        else:
            o_a, a_step = (first.to(gl.int64) + i_m) * blocks, 1
        if TILES:
            m_n = n0 < columns
            b_scale = (i * 0).to(gl.float32)
        else:
            m_n = i_n < columns - n0
            b_scale = gl.zeros([BN], gl.float32, line)
        if B_COLUMNS:
            o_b = scale_row * chunks + n0 // 128 if TILES else scale_row * columns + n0 + i_n
            b_step = chunks if TILES else columns
        else:
            row = group.to(gl.int64) * (chunks if TILES else columns)
            o_b = (row + n0 // 128) * blocks if TILES else (row + n0 + i_n) * blocks
            b_step = 1
        m_m = i_m < left
        p_a_scale, p_b_scale = p_a_scales + o_a, p_b_scales + o_b
        zeros = gl.zeros([BM, BN], gl.float32, acc)
        state = (zeros, zeros, gl.zeros([BM], gl.float32, gl.SliceLayout(1, acc)), b_scale)
        for j in range(0, J, 256):
            scales = (p_a_scale, p_b_scale, m_m, m_n)
            cursor, state = _add_block(
                descs, ring, cursor, i, scales, state, p_table, p_ends, sizes, IS_DW, TILES, BG
            )
            # Where there is no second block its scales are zeros, like its codes.
            is_there = j + 128 < J
            scales = (p_a_scale + a_step, p_b_scale + b_step, m_m & is_there, m_n & is_there)
            cursor, state = _add_block(
                descs, ring, cursor, i + 1, scales, state, p_table, p_ends, sizes, IS_DW, TILES, BG
            )
            p_a_scale += 2 * a_step
            p_b_scale += 2 * b_step
            i += 2
        total = _add_scaled(state[0], state[1], state[2], state[3], TILES)
        store_sums(p_out + o_out, columns, left, columns - n0, total, BM, BN)
