"""The gradient of a group's weight on a Hopper GPU: ``dw[g] = dy[g].T @ x[g]``.

The sum goes over the rows of a group, so a tile takes as long as its group has rows.  Tiles of
the largest group are given out first (:mod:`backstash.kernels.tiles`), and those of the empty
groups last: they are stored as the zeros that they start as.

The last block of a group's rows is filled up with zeros by the copy engine, in both operands,
so that no row of another group, nor of the tail, gets near the sum.

Letters: T rows, N and K columns of the two operands, G groups.
"""

# Gluon's annotations do not say what its compiler takes.
# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from backstash.kernels.tiles import groups_by_size
from backstash.kernels.warpgroups import (
    FAR,
    async_load,
    give_ticket,
    matrices,
    multiply,
    new_aligned,
    new_barriers,
    ragged,
    store_block,
    take_ticket,
)

TILE: dict[str, Any] = {"HALF": 64, "BN": 256, "BK": 64, "STAGES": 4}


@gluon.jit
def _locate(p_table, ticket, tiles, high, wide):
    """The rows and the group of a tile, and its place among the group's ``high * wide`` tiles."""
    ticket = gl.minimum(ticket, tiles - 1)
    place = ticket % (high * wide)
    p_entry = p_table + ticket // (high * wide) * 4
    start, end, group = gl.load(p_entry), gl.load(p_entry + 1), gl.load(p_entry + 2)
    return start, end, group, place % high, place // high


@gluon.jit
def _fetch(
    a_desc,
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
    high,
    wide,
    HALF: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
):
    block_bytes: gl.constexpr = BK * (2 * HALF + BN) * a_desc.dtype.primitive_bitwidth // 8
    ticket = gl.atomic_add(p_table + 3, 1, sem="relaxed")
    n = 0
    i = 0
    tiles = groups * high * wide
    while ticket < tiles:
        give_ticket(tickets, given, taken, n, ticket)
        start, end, _, i_high, i_wide = _locate(p_table, ticket, tiles, high, wide)
        ticket = gl.atomic_add(p_table + 3, 1, sem="relaxed")
        for first in range(start, end, BK):
            stage = i % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (i // STAGES & 1) ^ 1)
            mbarrier.expect(bar, block_bytes)
            rows = gl.minimum(end - first, BK)
            stop, place = first + rows, FAR - rows
            column = i_high * 2 * HALF
            a_low = a_smem.index(2 * stage + 1)
            async_load(a_desc, [FAR, stop, place, column], bar, a_smem.index(2 * stage))
            async_load(a_desc, [FAR, stop, place, column + HALF], bar, a_low)
            async_load(b_desc, [FAR, stop, place, i_wide * BN], bar, b_smem.index(stage))
            i += 1
        n += 1
    give_ticket(tickets, given, taken, n, ticket)


@gluon.jit
def _multiply_half(
    c_desc,
    a_smem,
    b_smem,
    c_smem,
    full,
    empty,
    tickets,
    given,
    taken,
    p_table,
    groups,
    high,
    wide,
    half: gl.constexpr,
    HALF: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
):
    n = 0
    i = 0
    tiles = groups * high * wide
    ticket = take_ticket(tickets, given, taken, n)
    start, end, group, i_high, i_wide = _locate(p_table, ticket, tiles, high, wide)
    while ticket < tiles:
        steps = (end - start + BK - 1) // BK
        total = multiply(
            a_smem, b_smem, full, empty, i, steps, half, HALF, BN, BK, STAGES, False, False
        )
        i += steps
        n += 1
        matrix, row, column = group, (2 * i_high + half) * HALF, i_wide * BN
        # The next tile is looked up before this one is stored: storing hides how long it takes.
        ticket = take_ticket(tickets, given, taken, n)
        start, end, group, i_high, i_wide = _locate(p_table, ticket, tiles, high, wide)
        store_block(c_desc, c_smem, total, matrix, row, column, HALF, BN)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["groups", "high", "wide"])
def _columns_kernel(
    a_desc,
    b_desc,
    c_desc,
    p_table,
    groups,
    high,
    wide,
    HALF: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
):
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [2 * STAGES, 1, 1, BK, HALF], a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 1, 1, BK, BN], b_desc.layout)
    c_block: gl.constexpr = [1, HALF, BN // 2]
    c_high = gl.allocate_shared_memory(c_desc.dtype, c_block, c_desc.layout)
    c_low = gl.allocate_shared_memory(c_desc.dtype, c_block, c_desc.layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tickets = gl.allocate_shared_memory(gl.int32, [2, 1], flat)
    full = new_barriers(STAGES, 1)
    empty = new_barriers(STAGES, 2)
    given = new_barriers(2, 1)
    taken = new_barriers(2, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _multiply_half,
                (c_desc, a_smem, b_smem, c_high, full, empty, tickets, given, taken, p_table,
                 groups, high, wide, 0, HALF, BN, BK, STAGES),
            ),
            (
                _multiply_half,
                (c_desc, a_smem, b_smem, c_low, full, empty, tickets, given, taken, p_table,
                 groups, high, wide, 1, HALF, BN, BK, STAGES),
            ),
            (
                _fetch,
                (a_desc, b_desc, a_smem, b_smem, full, empty, tickets, given, taken, p_table,
                 groups, high, wide, HALF, BN, BK, STAGES),
            ),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def multiply_columns(dy_TN: Tensor, x_TK: Tensor, ends_G: Tensor) -> Tensor:
    """``dw_GNK[g] = dy[g].T @ x[g]``, zeros for an empty group.

    Both are aligned, and their dtype is one of :data:`~backstash.kernels.warpgroups.DTYPES`.
    """
    groups, (T, N), K = len(ends_G), dy_TN.shape, x_TK.shape[1]
    dw_GNK = new_aligned((groups, N, K), x_TK)
    half, columns, block = TILE["HALF"], TILE["BN"], TILE["BK"]
    programs = torch.cuda.get_device_properties(x_TK.device).multi_processor_count
    _columns_kernel[(programs,)](
        ragged(dy_TN, block, half),
        ragged(x_TK, block, columns),
        matrices(dw_GNK, half, columns // 2),
        groups_by_size(ends_G, T),
        groups,
        triton.cdiv(N, 2 * half),
        triton.cdiv(K, columns),
        **TILE,
        num_warps=4,
    )
    return dw_GNK
