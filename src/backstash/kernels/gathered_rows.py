"""Rows that are copies of tokens, times the weight of their group, on a Hopper GPU.

The kernel of :mod:`backstash.kernels.grouped_rows` with another hand at the ring: the copy engine
takes no list of rows, so four warps fetch, each thread 16 bytes at a time, eight threads a row.
They know a tile's tokens before its first block, and ask for as many blocks ahead as the ring has.
A block of the weights still comes by the engine.  Its barrier opens when the engine and each of the
128 threads have said that what they asked for is there.

Float8 codes are fetched the same way, and their scales through the map as well.

The last block of a group asks for its last row again where it has no more: a row of the result
depends on its own row only, and only the group's rows are stored.

Letters: T tokens, R rows, J columns of the rows, C columns of the result, G groups.
"""

# Gluon's annotations do not say what its compiler takes.
# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from backstash.device import processor_count
from backstash.kernels.grouped_rows import TILE, locate_tile, multiply_tiles
from backstash.kernels.launches import Launcher
from backstash.kernels.reference.float8_mm import Scaled
from backstash.kernels.sizes import ceil_div
from backstash.kernels.tables import row_table
from backstash.kernels.warpgroups import (
    async_load,
    give_ticket,
    matrices,
    new_aligned,
    new_ring,
    ragged,
    shared_layout,
    stages_for,
    values_a_block,
)


@gluon.jit
def _fetch(
    p_a,
    p_source,
    a_stride,
    b_desc,
    a_smem,
    b_smem,
    full,
    empty,
    tickets,
    given,
    taken,
    p_table,
    groups,
    inner,
    used,
    chunks,
    HALF: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    PATCH: gl.constexpr,
    B_ROWS: gl.constexpr,
):
    wide: gl.constexpr = 128 // p_a.dtype.element_ty.primitive_bitwidth
    layout: gl.constexpr = gl.BlockedLayout([1, wide], [4, 8], [4, 1], [1, 0])
    i_row = gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    i_column = gl.arange(0, BK, layout=gl.SliceLayout(0, layout)).expand_dims(0)
    ticket = gl.atomic_add(p_table + 7, 1, sem="relaxed")
    n = 0
    i = 0
    while ticket < used * chunks:
        give_ticket(tickets, given, taken, n, ticket, 4)
        first, end, group, chunk = locate_tile(p_table, ticket, used, chunks, PATCH)
        steps = gl.where(group < groups, inner // BK, 0)
        ticket = gl.atomic_add(p_table + 7, 1, sem="relaxed")
        high = gl.load(p_source + gl.minimum(first + i_row, end - 1)).to(gl.int64)
        low = gl.load(p_source + gl.minimum(first + HALF + i_row, end - 1)).to(gl.int64)
        p_high = p_a + (high * a_stride).expand_dims(1) + i_column
        p_low = p_a + (low * a_stride).expand_dims(1) + i_column
        for step in range(steps):
            stage = (i + step) % STAGES
            k = step * BK
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), ((i + step) // STAGES & 1) ^ 1)
            mbarrier.expect(bar, BN * BK * b_desc.dtype.primitive_bitwidth // 8)
            place = [group, chunk * BN, k] if B_ROWS else [group, k, chunk * BN]
            async_load(b_desc, place, bar, b_smem.index(stage))
            async_copy.async_copy_global_to_shared(a_smem.index(2 * stage), p_high + k)
            async_copy.async_copy_global_to_shared(a_smem.index(2 * stage + 1), p_low + k)
            async_copy.mbarrier_arrive(bar, increment_count=False)
        i += steps
        n += 1
    give_ticket(tickets, given, taken, n, ticket, 4)


@gluon.jit(do_not_specialize=["groups", "inner", "chunks"])
def _rows_kernel(
    p_a,
    p_source,
    a_stride,
    a_layout: gl.constexpr,
    b_desc,
    c_desc,
    p_table,
    p_a_scale,
    p_b_scale,
    groups,
    inner,
    chunks,
    HALF: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    PATCH: gl.constexpr,
    B_ROWS: gl.constexpr,
    EXACT: gl.constexpr,
):
    used = gl.load(p_table + 3)
    a_smem = gl.allocate_shared_memory(p_a.dtype.element_ty, [2 * STAGES, HALF, BK], a_layout)
    b_blocks: gl.constexpr = [STAGES, 1, BN, BK] if B_ROWS else [STAGES, 1, BK, BN]
    b_smem = gl.allocate_shared_memory(b_desc.dtype, b_blocks, b_desc.layout)
    c_block: gl.constexpr = [1, 1, HALF, BN // 2]
    c_high = gl.allocate_shared_memory(c_desc.dtype, c_block, c_desc.layout)
    c_low = gl.allocate_shared_memory(c_desc.dtype, c_block, c_desc.layout)
    # The copy engine and each thread that fetches.
    full, empty, tickets, given, taken = new_ring(STAGES, 129)
    gl.warp_specialize(
        [
            (
                multiply_tiles,
                (c_desc, a_smem, b_smem, c_high, full, empty, tickets, given, taken, p_table,
                 p_source, p_a_scale, p_b_scale, groups, inner, used, chunks, 0, HALF, BN, BK,
                 STAGES, PATCH, B_ROWS, EXACT, True),
            ),
            (
                multiply_tiles,
                (c_desc, a_smem, b_smem, c_low, full, empty, tickets, given, taken, p_table,
                 p_source, p_a_scale, p_b_scale, groups, inner, used, chunks, 1, HALF, BN, BK,
                 STAGES, PATCH, B_ROWS, EXACT, True),
            ),
            (
                _fetch,
                (p_a, p_source, a_stride, b_desc, a_smem, b_smem, full, empty, tickets, given,
                 taken, p_table, groups, inner, used, chunks, HALF, BN, BK, STAGES, PATCH, B_ROWS),
            ),
        ],
        [4, 4],
        # Two sums at a time need more registers than what fetches can spare beside one.
        [232, 40] if EXACT else [224, 56],
    )  # fmt: skip


_multiply = Launcher(_rows_kernel)


def multiply_gathered_rows(a_TJ: Tensor, source_R: Tensor, b_GJC: Tensor, ends_G: Tensor) -> Tensor:
    """``y_RC[r] = a_TJ[source_R[r]] @ b_GJC[g(r)]``; zeros in the tail.

    Both are aligned, ``b_GJC`` as it is or with its last two dimensions exchanged, their dtype is
    one of :data:`~backstash.kernels.warpgroups.DTYPES`, and J is whole blocks of 128 bytes.
    """
    columns, block = TILE["BN"], values_a_block(a_TJ)
    y_RC = new_aligned((source_R.shape[0], b_GJC.shape[2]), a_TJ)
    is_rows = b_GJC.stride(1) == 1
    b_desc = matrices(b_GJC.mT, columns, block) if is_rows else matrices(b_GJC, block, columns)
    _launch((a_TJ, source_R), b_desc, ends_G, y_RC)
    return y_RC


def multiply_gathered_scaled_rows(
    a: Scaled,
    b: Scaled,
    ends_G: Tensor,
    source_R: Tensor,
    dtype: torch.dtype,
    *,
    fast_accumulation: bool,
) -> Tensor:
    """``multiply_scaled_rows`` of the rows of ``a`` that a map names, in ``dtype``.

    Both are aligned, and rows are whole blocks of 128 codes.
    """
    y_RC = new_aligned((source_R.shape[0], b.codes.shape[1]), a.codes, dtype)
    b_desc = matrices(b.codes, TILE["BN"], values_a_block(b.codes))
    scales = a.scale_inv.contiguous(), b.scale_inv.contiguous()
    _launch((a.codes, source_R), b_desc, ends_G, y_RC, scales, is_exact=not fast_accumulation)
    return y_RC


def _launch(
    rows: tuple[Tensor, Tensor],
    b_desc: Any,
    ends_G: Tensor,
    y_RC: Tensor,
    scales: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
    *,
    is_exact: bool = False,
) -> None:
    (a_TJ, source_R), (R, C), J = rows, y_RC.shape, rows[0].shape[1]
    half, columns, block = TILE["HALF"], TILE["BN"], values_a_block(a_TJ)
    _multiply(
        processor_count(a_TJ.device),
        a_TJ,
        source_R.contiguous(),
        a_TJ.stride(0),
        shared_layout(a_TJ, [half, block]),
        b_desc,
        ragged(y_RC, half, columns // 2),
        row_table(ends_G, R, 2 * half),
        *scales,
        ends_G.shape[0],
        J,
        ceil_div(C, columns),
        **stages_for(y_RC, TILE),
        BK=block,
        B_ROWS=b_desc.block_shape[-1] == block,
        EXACT=is_exact,
        num_warps=4,
    )
