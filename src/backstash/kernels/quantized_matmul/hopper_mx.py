"""Products on MXFP8 codes on a Hopper GPU, decoded while the tensor cores multiply.

The same sums as in ``mx``: codes times powers of two, in bfloat16, exactly.  What the next step
multiplies is decoded during the present one, into the other half of a buffer in shared memory,
or into registers where blocks lie along rows and the operand is the left one.

Letters: as in ``places``; BK of J are multiplied in a step.
"""

# Gluon's annotations do not say what its compiler takes.
# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# Nor does its compiler take a star in a list.
# ruff: noqa: RUF005

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
    wait_for_all,
)
from backstash.kernels.warpgroups import async_load


@gluon.jit
def _fetch(descs, ring, cursor, p_table, sizes, IS_DW: gl.constexpr, B_COLUMNS: gl.constexpr):
    """Ask for the next block, of this tile or of the next that adds up anything.

    The cursor: the next tile, blocks left of this one, where the next lies in both operands,
    and how many have been asked for.
    """
    a_desc, b_desc = descs
    a_smem, b_smem, full = ring
    STAGES: gl.constexpr = a_smem.shape[0]
    BM: gl.constexpr = a_smem.shape[2] if IS_DW else a_smem.shape[1]
    BK: gl.constexpr = a_smem.shape[1] if IS_DW else a_smem.shape[2]
    BN: gl.constexpr = b_smem.shape[2] if B_COLUMNS else b_smem.shape[1]
    i_tile, left, a_0, a_1, b_0, b_1, i = cursor
    _, _, length, _, columns, tiles = sizes
    while (left == 0) & (i_tile < tiles):
        if IS_DW:
            a_0, J, _, a_1, b_1 = group_place(p_table, i_tile, sizes, BM, BN)
            b_0 = a_0
        else:
            a_0, _, group, n0, J = row_place(p_table, i_tile, sizes, BM, BN)
            a_1 *= 0
            b_0 = group * length if B_COLUMNS else group * columns + n0
            b_1 = n0 if B_COLUMNS else a_1
        left = (J + BK - 1) // BK
        i_tile += gl.num_programs(0)
    more = left > 0
    bar = full.index(i % STAGES)
    mbarrier.expect(bar, (BM + BN) * BK, pred=more)
    async_load(a_desc, [a_0, a_1], bar, a_smem.index(i % STAGES), pred=more)
    async_load(b_desc, [b_0, b_1], bar, b_smem.index(i % STAGES), pred=more)
    if IS_DW:
        a_0 += BK
    else:
        a_1 += BK
    if B_COLUMNS:
        b_0 += BK
    else:
        b_1 += BK
    return i_tile, left - more.to(gl.int32), a_0, a_1, b_0, b_1, i + more.to(gl.int32)


@gluon.jit
def _factor(exponents):
    """``2^(exponent - 127)``; 255 is NaN, and 0 is 2^-127, whose own exponent field is 0."""
    exponents = exponents.to(gl.int32)
    bits = gl.maximum(exponents << 23, 0x400000) | ((exponents + 1) >> 8 << 22)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _decode_rows(codes, exponents):
    """A tile ``(B, BK)`` in bfloat16, of codes with blocks along rows."""
    B: gl.constexpr = codes.shape[0]
    BK: gl.constexpr = codes.shape[1]
    values = codes.to(gl.float32).reshape([B, BK // 32, 32]) * _factor(exponents).expand_dims(2)
    return values.to(gl.bfloat16).reshape([B, BK])


@gluon.jit
def _decode_columns(codes, exponents, J, IS_DW: gl.constexpr):
    """A tile ``(BK, B)`` in bfloat16, of codes with blocks down columns.

    The rows of ``dw`` end where their group does: what comes after is another's, or the tail's.
    """
    BK: gl.constexpr = codes.shape[0]
    B: gl.constexpr = codes.shape[1]
    values = codes.to(gl.float32).reshape([BK // 32, 32, B]) * _factor(exponents).expand_dims(1)
    values = values.reshape([BK, B])
    if IS_DW:
        i_j = gl.arange(0, BK, layout=gl.SliceLayout(1, values.type.layout))
        values = gl.where((i_j < J).expand_dims(1), values, 0.0)
    return values.to(gl.bfloat16)


@gluon.jit
def _decode(ring, values, i, exponents, J, layouts: gl.constexpr, IS_DW, B_COLUMNS):
    """Decode the i-th block of both operands; the left one's values, where they are registers."""
    a_smem, b_smem, full = ring
    a_values, b_values = values
    a_exponents, b_exponents = exponents
    a_layout: gl.constexpr = layouts[0]
    b_layout: gl.constexpr = layouts[1]
    STAGES: gl.constexpr = a_smem.shape[0]
    stage = i % STAGES
    mbarrier.wait(full.index(stage), i // STAGES & 1)
    b = b_smem.index(stage).load(b_layout)
    if B_COLUMNS:
        b_values.index(i % 2).store(_decode_columns(b, b_exponents, J, IS_DW))
    else:
        b_values.index(i % 2).store(_decode_rows(b, b_exponents))
    a = a_smem.index(stage).load(a_layout)
    if IS_DW:
        a_values.index(i % 2).store(_decode_columns(a, a_exponents, J, IS_DW))
        registers = stage * 0
    else:
        registers = gl.convert_layout(_decode_rows(a, a_exponents), a_layout, assert_trivial=True)
    fence_async_shared()
    return registers


@gluon.jit
def _exponents(layout: gl.constexpr, line_ld, step_ld, left, COLUMNS, SPAN, B, BK: gl.constexpr):
    """Where the exponents of a tile lie, which of its lines there are, and their blocks.

    All in the layout that they have beside the codes; SPAN lines share one.
    """
    S: gl.constexpr = BK // 32
    if COLUMNS:
        beside = gl.zeros([BK, B], gl.int8, layout).reshape([S, 32, B])
        tile: gl.constexpr = gl.SliceLayout(1, beside.type.layout)
        i_s = gl.arange(0, S, layout=gl.SliceLayout(1, tile)).expand_dims(1)
        i_line = gl.arange(0, B, layout=gl.SliceLayout(0, tile)).expand_dims(0)
    else:
        beside = gl.zeros([B, BK], gl.int8, layout).reshape([B, S, 32])
        tile: gl.constexpr = gl.SliceLayout(2, beside.type.layout)
        i_s = gl.arange(0, S, layout=gl.SliceLayout(0, tile)).expand_dims(0)
        i_line = gl.arange(0, B, layout=gl.SliceLayout(1, tile)).expand_dims(1)
    return i_line // SPAN * line_ld + i_s * step_ld, i_line < left, i_s


@gluon.jit
def _load(p_a_scale, p_b_scale, a_places, b_places, blocks):
    """The exponents of a step, of which ``blocks`` along what is added up are left."""
    o_a, m_a, a_s = a_places
    o_b, m_b, b_s = b_places
    a = gl.load(p_a_scale + o_a, mask=m_a & (a_s < blocks), other=0)
    b = gl.load(p_b_scale + o_b, mask=m_b & (b_s < blocks), other=0)
    return a, b


@gluon.jit(do_not_specialize=["groups", "rows", "tiles"])
def hopper_mx_kernel(
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
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    BG: gl.constexpr,
):
    """Blocks of b lie down columns for ``dx``, those of both for ``dw``; b may be in tiles."""
    W: gl.constexpr = gl.num_warps()
    S: gl.constexpr = BK // 32
    SPAN: gl.constexpr = 32 if TILES else 1
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, BN, 16])
    # A thread has few columns and many rows, or it would need a scale for each of its codes.
    a_down: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [W * 32 // BM, BM // 32], [1, 0])
    b_down: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [W * 32 // BN, BN // 32], [1, 0])
    b_along: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [W, 1], [1, 0])
    a_layout: gl.constexpr = a_down if IS_DW else gl.DotOperandLayout(0, acc, 2)
    b_layout: gl.constexpr = b_down if B_COLUMNS else b_along
    a_block: gl.constexpr = [BK, BM] if IS_DW else [BM, BK]
    b_block: gl.constexpr = [BK, BN] if B_COLUMNS else [BN, BK]
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES] + a_block, a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_block, b_desc.layout)
    b_values = gl.allocate_shared_memory(
        gl.bfloat16, [2] + b_block, gl.NVMMASharedLayout.get_default_for(b_block, gl.bfloat16)
    )
    a_values = b_values
    if IS_DW:
        a_values = gl.allocate_shared_memory(
            gl.bfloat16, [2] + a_block, gl.NVMMASharedLayout.get_default_for(a_block, gl.bfloat16)
        )
    descs, ring, values = (a_desc, b_desc), (a_smem, b_smem, new_ring(STAGES)), (a_values, b_values)
    layouts: gl.constexpr = (a_layout, b_layout)
    fence_async_shared()
    sizes = (groups, rows, length, M, columns, tiles)
    i = gl.program_id(0) * 0
    cursor = (gl.program_id(0), i, i, i, i, i, i)
    for _ in range(STAGES - 1):
        cursor = _fetch(descs, ring, cursor, p_table, sizes, IS_DW, B_COLUMNS)
    blocks = (length + 31) // 32
    chunks = (columns + SPAN - 1) // SPAN
    for i_tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first, left, group, n0, J, block, o_out = tile_place(
            p_table, p_ends, i_tile, sizes, blocks, IS_DW, 32, BM, BN, BG
        )
        if IS_DW:
            p_a_scale, a_step = p_a_scales + block * M + first, S * M
            a_places = _exponents(a_layout, 1, M, left, True, 1, BM, BK)
        else:
            p_a_scale, a_step = p_a_scales + first.to(gl.int64) * blocks, S
            a_places = _exponents(a_layout, blocks, 1, left, False, 1, BM, BK)
        if B_COLUMNS:
            p_b_scale, b_step = p_b_scales + block * chunks + n0 // SPAN, S * chunks
            b_places = _exponents(b_layout, 1, chunks, columns - n0, True, SPAN, BN, BK)
        else:
            row = group.to(gl.int64) * chunks + n0 // SPAN
            p_b_scale, b_step = p_b_scales + row * blocks, S
            b_places = _exponents(b_layout, blocks, 1, columns - n0, False, SPAN, BN, BK)
        total = gl.zeros([BM, BN], gl.float32, acc)
        a = i * 0 if IS_DW else gl.zeros(a_block, gl.bfloat16, a_layout)
        exponents = _load(p_a_scale, p_b_scale, a_places, b_places, (J + 31) // 32)
        if J > 0:
            a = _decode(ring, values, i, exponents, J, layouts, IS_DW, B_COLUMNS)
            p_a_scale += a_step
            p_b_scale += b_step
            exponents = _load(p_a_scale, p_b_scale, a_places, b_places, (J - BK + 31) // 32)
            wait_for_all()
        for j in range(0, J, BK):
            left_operand = a_values.index(i % 2).permute((1, 0)) if IS_DW else a
            b = b_values.index(i % 2)
            b = b if B_COLUMNS else b.permute((1, 0))
            running = warpgroup_mma(left_operand, b, total, use_acc=j > 0, is_async=True)
            # Everybody has decoded the block that lies where the next is fetched to.
            cursor = _fetch(descs, ring, cursor, p_table, sizes, IS_DW, B_COLUMNS)
            read = a
            if j + BK < J:
                p_a_scale += a_step
                p_b_scale += b_step
                rest = (J - j - 2 * BK + 31) // 32
                following = _load(p_a_scale, p_b_scale, a_places, b_places, rest)
                a = _decode(ring, values, i + 1, exponents, J - j - BK, layouts, IS_DW, B_COLUMNS)
                exponents = following
            if IS_DW:
                total = warpgroup_mma_wait(0, deps=(running,))
            else:
                # The registers of the left operand are read until then.
                total, read = warpgroup_mma_wait(0, deps=(running, read))
            wait_for_all()
            i += 1
        store_sums(p_out + o_out, columns, left, columns - n0, total, BM, BN)
