"""Rows in slabs times the weight of their group, into slabs, on a Hopper GPU.

The kernel of :mod:`backstash.kernels.grouped_rows` on other places: a block of rows begins where
its group does, or whole slabs later, so each half of a tile reads one slab and writes one.  The
copy engine reads and writes them as blocks of one tall matrix, all pages of the pool, so a tile is
fetched and stored in as many steps as if its rows lay one after another.  In which page a slab is,
is asked for one slab ahead, and used when it has come.

A launch without room has slabs past the last page: the engine reads zeros there and writes nothing.

Letters: T rows, J columns of the rows, C columns of the result, G groups.
"""

# Gluon's annotations do not say what its compiler takes.
# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from backstash.device import processor_count
from backstash.kernels.grouped_rows import TILE, locate_tile
from backstash.kernels.launches import Launcher
from backstash.kernels.reference.slabs import Slabs
from backstash.kernels.sizes import ceil_div
from backstash.kernels.tables import row_table
from backstash.kernels.warpgroups import (
    async_load,
    give_ticket,
    matrices,
    matrix,
    multiply,
    new_ring,
    pass_over,
    store_slab,
    take_ticket,
    values_a_block,
)


@gluon.jit
def slab_number(p_shift, group, first, HALF: gl.constexpr):
    """The number of the slab that row ``first`` of a group begins."""
    return (first + gl.load(p_shift + group)) // HALF


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
    inner,
    used,
    chunks,
    HALF: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    PATCH: gl.constexpr,
    PAGE: gl.constexpr,
):
    block_bytes: gl.constexpr = BK * a_desc.dtype.primitive_bitwidth // 8
    strips = inner // PAGE
    ticket = gl.atomic_add(p_table + 7, 1, sem="relaxed")
    n = 0
    i = 0
    while ticket < used * chunks:
        give_ticket(tickets, given, taken, n, ticket, 1)
        first, end, group, chunk = locate_tile(p_table, ticket, used, chunks, PATCH)
        has_low = end > first + HALF
        ticket = gl.atomic_add(p_table + 7, 1, sem="relaxed")
        if group < groups:
            p_high = p_slots + slab_number(p_shift, group, first, HALF) * pitch
            p_low = p_high + gl.where(has_low, pitch, 0)
            page_high, page_low = gl.load(p_high), gl.load(p_low)
            for strip in range(strips):
                high, low = page_high.to(gl.int32) * HALF, page_low.to(gl.int32) * HALF
                # Asked for now and used with the next slab: by then it has come.
                following = gl.minimum(strip + 1, strips - 1)
                page_high, page_low = gl.load(p_high + following), gl.load(p_low + following)
                for column in range(0, PAGE, BK):
                    stage = i % STAGES
                    bar = full.index(stage)
                    mbarrier.wait(empty.index(stage), (i // STAGES & 1) ^ 1)
                    mbarrier.expect(bar, (2 * HALF + BN) * block_bytes, pred=has_low)
                    mbarrier.expect(bar, (HALF + BN) * block_bytes, pred=first + HALF >= end)
                    below = a_smem.index(2 * stage + 1)
                    async_load(a_desc, [high, column], bar, a_smem.index(2 * stage))
                    async_load(a_desc, [low, column], bar, below, pred=has_low)
                    place = [group, chunk * BN, strip * PAGE + column]
                    async_load(b_desc, place, bar, b_smem.index(stage))
                    i += 1
        n += 1
    give_ticket(tickets, given, taken, n, ticket, 1)


@gluon.jit
def _multiply_tiles(
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
    p_slots,
    p_shift,
    pitch,
    groups,
    inner,
    used,
    chunks,
    half: gl.constexpr,
    HALF: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    PATCH: gl.constexpr,
    PAGE: gl.constexpr,
):
    """Multiply one half of each tile of this program, and store it; the tail has no slabs."""
    n = 0
    i = 0
    ticket = take_ticket(tickets, given, taken, n)
    first, end, group, chunk = locate_tile(p_table, ticket, used, chunks, PATCH)
    while ticket < used * chunks:
        steps = gl.where(group < groups, inner // BK, 0)
        first += half * HALF
        i += steps
        n += 1
        if (first < end) & (group < groups):
            p_page = p_slots + slab_number(p_shift, group, first, HALF) * pitch + chunk * BN // PAGE
            row = gl.load(p_page).to(gl.int32) * HALF
            total = multiply(
                a_smem,
                b_smem,
                full,
                empty,
                i - steps,
                steps,
                half,
                HALF,
                BN,
                BK,
                STAGES,
                True,
                True,
                False,
            )
            column = chunk * BN % PAGE
            # The next tile is looked up before this one is stored: storing hides how long it takes.
            ticket = take_ticket(tickets, given, taken, n)
            first, end, group, chunk = locate_tile(p_table, ticket, used, chunks, PATCH)
            store_slab(c_desc, c_smem, total, row, column, HALF, BN)
        else:
            pass_over(full, empty, i - steps, steps, STAGES)
            ticket = take_ticket(tickets, given, taken, n)
            first, end, group, chunk = locate_tile(p_table, ticket, used, chunks, PATCH)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["groups", "inner", "chunks", "a_first", "c_first", "pitch"])
def _rows_kernel(
    a_desc,
    b_desc,
    c_desc,
    p_table,
    p_claim,
    p_shift,
    a_first,
    c_first,
    pitch,
    groups,
    inner,
    chunks,
    HALF: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    PATCH: gl.constexpr,
    PAGE: gl.constexpr,
):
    used = gl.load(p_table + 3)
    p_a, p_c = p_claim + a_first, p_claim + c_first
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [2 * STAGES, HALF, BK], a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 1, BN, BK], b_desc.layout)
    c_high = gl.allocate_shared_memory(c_desc.dtype, [HALF, BN // 2], c_desc.layout)
    c_low = gl.allocate_shared_memory(c_desc.dtype, [HALF, BN // 2], c_desc.layout)
    full, empty, tickets, given, taken = new_ring(STAGES, 1)
    gl.warp_specialize(
        [
            (
                _multiply_tiles,
                (c_desc, a_smem, b_smem, c_high, full, empty, tickets, given, taken, p_table,
                 p_c, p_shift, pitch, groups, inner, used, chunks, 0, HALF, BN, BK, STAGES, PATCH,
                 PAGE),
            ),
            (
                _multiply_tiles,
                (c_desc, a_smem, b_smem, c_low, full, empty, tickets, given, taken, p_table,
                 p_c, p_shift, pitch, groups, inner, used, chunks, 1, HALF, BN, BK, STAGES, PATCH,
                 PAGE),
            ),
            (
                _fetch,
                (a_desc, b_desc, a_smem, b_smem, full, empty, tickets, given, taken, p_table,
                 p_a, p_shift, pitch, groups, inner, used, chunks, HALF, BN, BK, STAGES, PATCH,
                 PAGE),
            ),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


_multiply = Launcher(_rows_kernel)


def multiply_slabs(x: Slabs, w_GNK: Tensor, ends_G: Tensor, into: Slabs) -> None:
    """Write each row of ``x`` times its group's ``w^T`` into the slabs of ``into``.

    ``w_GNK`` is aligned and both are slabs of one launch; the tail is in none.
    """
    (T, J), C = x.shape, into.shape[1]
    half, columns, block = TILE["HALF"], TILE["BN"], values_a_block(w_GNK)
    pages = x.pages()
    _multiply(
        processor_count(w_GNK.device),
        matrix(pages, half, block),
        matrices(w_GNK, columns, block),
        matrix(pages, half, columns // 2),
        row_table(ends_G, T, 2 * half),
        x.table,
        x.shift_G,
        x.first,
        into.first,
        x.pitch,
        ends_G.shape[0],
        J,
        ceil_div(C, columns),
        **TILE,
        BK=block,
        PAGE=pages.shape[1],
        num_warps=4,
    )
