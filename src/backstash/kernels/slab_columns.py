"""The gradient of a group's weight whose rows are in slabs, on a Hopper GPU.

The kernel of :mod:`backstash.kernels.grouped_columns` on other places: a block of a group's rows is
a slab, which the copy engine reads from its page.  What fills the last slab of a group up are
zeros, as the engine fills the other operand up.

Letters: T rows, N and K columns of the two operands, G groups.
"""

# Gluon's annotations do not say what its compiler takes.
# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from backstash.device import processor_count
from backstash.kernels.grouped_columns import TILE, locate_tile, multiply_tiles
from backstash.kernels.launches import Launcher
from backstash.kernels.reference.slabs import Slabs
from backstash.kernels.sizes import ceil_div
from backstash.kernels.slab_rows import slab_number
from backstash.kernels.tables import column_table
from backstash.kernels.warpgroups import (
    FAR,
    async_load,
    give_ticket,
    matrices,
    matrix,
    new_aligned,
    new_ring,
    ragged,
    values_a_block,
)


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
    p_slots,
    p_shift,
    pitch,
    groups,
    high,
    wide,
    HALF: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    PAGE: gl.constexpr,
):
    block_bytes: gl.constexpr = BK * (2 * HALF + BN) * a_desc.dtype.primitive_bitwidth // 8
    ticket = gl.atomic_add(p_table + 3, 1, sem="relaxed")
    n = 0
    i = 0
    tiles = groups * high * wide
    while ticket < tiles:
        give_ticket(tickets, given, taken, n, ticket, 1)
        start, end, group, i_high, i_wide = locate_tile(p_table, ticket, tiles, high, wide)
        ticket = gl.atomic_add(p_table + 3, 1, sem="relaxed")
        column = i_high * 2 * HALF
        p_page = p_slots + slab_number(p_shift, group, start, BK) * pitch + i_wide * BN // PAGE
        page = gl.load(p_page, mask=start < end, other=0)
        for first in range(start, end, BK):
            stage = i % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (i // STAGES & 1) ^ 1)
            mbarrier.expect(bar, block_bytes)
            rows = gl.minimum(end - first, BK)
            stop, place = first + rows, FAR - rows
            a_low = a_smem.index(2 * stage + 1)
            async_load(a_desc, [FAR, stop, place, column], bar, a_smem.index(2 * stage))
            async_load(a_desc, [FAR, stop, place, column + HALF], bar, a_low)
            row = page.to(gl.int32) * BK
            async_load(b_desc, [row, i_wide * BN % PAGE], bar, b_smem.index(stage))
            # Asked for now and used in the next turn.
            p_page += pitch
            page = gl.load(p_page, mask=first + BK < end, other=0)
            i += 1
        n += 1
    give_ticket(tickets, given, taken, n, ticket, 1)


@gluon.jit(do_not_specialize=["groups", "high", "wide", "b_first", "pitch"])
def _columns_kernel(
    a_desc,
    b_desc,
    c_desc,
    p_table,
    p_claim,
    p_shift,
    b_first,
    pitch,
    groups,
    high,
    wide,
    HALF: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    PAGE: gl.constexpr,
):
    p_slots = p_claim + b_first
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [2 * STAGES, 1, 1, BK, HALF], a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BK, BN], b_desc.layout)
    c_block: gl.constexpr = [1, HALF, BN // 2]
    c_high = gl.allocate_shared_memory(c_desc.dtype, c_block, c_desc.layout)
    c_low = gl.allocate_shared_memory(c_desc.dtype, c_block, c_desc.layout)
    full, empty, tickets, given, taken = new_ring(STAGES, 1)
    gl.warp_specialize(
        [
            (
                multiply_tiles,
                (c_desc, a_smem, b_smem, c_high, full, empty, tickets, given, taken, p_table,
                 None, None, groups, high, wide, 0, HALF, BN, BK, STAGES, False, False, False),
            ),
            (
                multiply_tiles,
                (c_desc, a_smem, b_smem, c_low, full, empty, tickets, given, taken, p_table,
                 None, None, groups, high, wide, 1, HALF, BN, BK, STAGES, False, False, False),
            ),
            (
                _fetch,
                (a_desc, b_desc, a_smem, b_smem, full, empty, tickets, given, taken, p_table,
                 p_slots, p_shift, pitch, groups, high, wide, HALF, BN, BK, STAGES, PAGE),
            ),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


_multiply = Launcher(_columns_kernel)


def multiply_slab_columns(dy_TN: Tensor, x: Slabs, ends_G: Tensor) -> Tensor:
    """``dw_GNK[g] = dy[g].T @ x[g]``, zeros for an empty group; ``dy_TN`` is aligned."""
    block, (T, K), N = values_a_block(dy_TN), x.shape, dy_TN.shape[1]
    half, columns = TILE["HALF"], TILE["BN"]
    pages = x.pages()
    dw_GNK = new_aligned((ends_G.shape[0], N, K), dy_TN)
    _multiply(
        processor_count(dy_TN.device),
        ragged(dy_TN, block, half),
        matrix(pages, block, columns),
        matrices(dw_GNK, half, columns // 2),
        column_table(ends_G, T),
        x.table,
        x.shift_G,
        x.first,
        x.pitch,
        ends_G.shape[0],
        ceil_div(N, 2 * half),
        ceil_div(K, columns),
        **TILE,
        BK=block,
        PAGE=pages.shape[1],
        num_warps=4,
    )
    return dw_GNK
