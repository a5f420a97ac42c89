"""The gradient of a group's weight from rows in pages, on a Hopper GPU: nothing is copied back.

The kernel of :mod:`backstash.kernels.gathered_columns` for rows that were stashed.  Four warps
fetch the rows, 16 bytes a thread, and look up the next block's pages while they ask for this one's:
the columns of a tile are a chunk that lies in one page.  The rows are the narrow operand of a tile,
as there is half as much to fetch of it by hand, so that a tile comes out turned and is turned
back as it is stored.

Each of the four warps has a scheduler to itself and few instructions to spare beside the products:
what is added up is a number for each row, and only a group's last block has a mask.

Letters: T rows, N and K columns of the two operands, G groups.
"""

# Gluon's annotations do not say what its compiler takes.
# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from backstash.device import processor_count
from backstash.kernels.grouped_columns import TILE, locate_tile, multiply_tiles
from backstash.kernels.launches import Launcher
from backstash.kernels.paged_rows import lookup_of
from backstash.kernels.reference.paged_rows import PagedRows
from backstash.kernels.sizes import ceil_div
from backstash.kernels.tables import column_table
from backstash.kernels.warpgroups import (
    FAR,
    async_load,
    give_ticket,
    matrices,
    new_aligned,
    new_ring,
    ragged,
    shared_layout,
    values_a_block,
)

#: Columns of a tile that come from pages: these must lie in one.
CHUNK = 2 * TILE["HALF"]


@gluon.jit
def _places(o_row, page, device_size, host, PAGE: gl.constexpr):
    """Where values are that have a place in the buffer and whose page has been looked up."""
    o_page = page * PAGE
    if host is not None:
        o_page += gl.where(page < device_size, 0, host)
    return o_page + (o_row % PAGE).to(gl.int64)


@gluon.jit
def _fetch(
    p_pages,
    p_launch,
    entry,
    first_slot,
    slots,
    device_size,
    host,
    stride,
    other_desc,
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
    PAGE: gl.constexpr,
):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i_row = gl.arange(0, BK, layout=gl.SliceLayout(1, layout))
    i_column = gl.arange(0, HALF, layout=gl.SliceLayout(0, layout)).expand_dims(0)
    item: gl.constexpr = other_desc.dtype.primitive_bitwidth // 8
    # Of a launch without room no row is in a page: all are zeros.
    in_pages = gl.load(p_launch + entry) // (stride * item)
    in_pages = gl.where(gl.load(p_launch + 2) == 0, in_pages, 0).to(gl.int32)
    p_slots = p_launch + slots + gl.load(p_launch + first_slot)
    ticket = gl.atomic_add(p_table + 3, 1, sem="relaxed")
    n = 0
    i = 0
    tiles = groups * high * wide
    while ticket < tiles:
        give_ticket(tickets, given, taken, n, ticket, 4)
        start, end, _, i_high, i_wide = locate_tile(p_table, ticket, tiles, high, wide)
        ticket = gl.atomic_add(p_table + 3, 1, sem="relaxed")
        there = gl.minimum(end, in_pages)
        o_row = (start + i_row).to(gl.uint64) * stride.to(gl.uint64) + (2 * HALF * i_high)
        page = gl.load(p_slots + o_row // PAGE, mask=start + i_row < there, other=0)
        for first in range(start, end, BK):
            p_block = p_pages + _places(o_row, page, device_size, host, PAGE).expand_dims(1)
            p_block += i_column
            # Asked for now and used in the next turn: by then it has come.
            o_row += BK * stride
            page = gl.load(p_slots + o_row // PAGE, mask=first + BK + i_row < there, other=0)
            stage = i % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (i // STAGES & 1) ^ 1)
            mbarrier.expect(bar, BK * BN * item)
            rows = gl.minimum(end - first, BK)
            place = [FAR, first + rows, FAR - rows, i_wide * BN]
            async_load(other_desc, place, bar, b_smem.index(stage))
            a_high = a_smem.index(2 * stage).reshape([BK, HALF])
            a_low = a_smem.index(2 * stage + 1).reshape([BK, HALF])
            if first + BK <= there:
                async_copy.async_copy_global_to_shared(a_high, p_block)
                async_copy.async_copy_global_to_shared(a_low, p_block + HALF)
            else:
                # What is masked is filled with zeros.
                mask = (first + i_row < there).expand_dims(1) & (i_column < HALF)
                async_copy.async_copy_global_to_shared(a_high, p_block, mask=mask)
                async_copy.async_copy_global_to_shared(a_low, p_block + HALF, mask=mask)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            i += 1
        n += 1
    give_ticket(tickets, given, taken, n, ticket, 4)


@gluon.jit(
    do_not_specialize=["entry", "first_slot", "slots", "device_size", "groups", "high", "wide"]
)
def _columns_kernel(
    p_pages,
    p_launch,
    entry,
    first_slot,
    slots,
    device_size,
    host,
    stride,
    a_layout: gl.constexpr,
    other_desc,
    c_desc,
    p_table,
    groups,
    high,
    wide,
    HALF: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    PAGE: gl.constexpr,
):
    a_smem = gl.allocate_shared_memory(other_desc.dtype, [2 * STAGES, 1, 1, BK, HALF], a_layout)
    b_smem = gl.allocate_shared_memory(other_desc.dtype, [STAGES, 1, 1, BK, BN], other_desc.layout)
    c_block: gl.constexpr = [1, BN // 2, HALF]
    c_high = gl.allocate_shared_memory(c_desc.dtype, c_block, c_desc.layout)
    c_low = gl.allocate_shared_memory(c_desc.dtype, c_block, c_desc.layout)
    # The copy engine and each thread that fetches.
    full, empty, tickets, given, taken = new_ring(STAGES, 129)
    gl.warp_specialize(
        [
            (
                multiply_tiles,
                (c_desc, a_smem, b_smem, c_high, full, empty, tickets, given, taken, p_table,
                 None, None, groups, high, wide, 0, HALF, BN, BK, STAGES, False, False, True),
            ),
            (
                multiply_tiles,
                (c_desc, a_smem, b_smem, c_low, full, empty, tickets, given, taken, p_table,
                 None, None, groups, high, wide, 1, HALF, BN, BK, STAGES, False, False, True),
            ),
            (
                _fetch,
                (p_pages, p_launch, entry, first_slot, slots, device_size, host, stride,
                 other_desc, a_smem, b_smem, full, empty, tickets, given, taken, p_table, groups,
                 high, wide, HALF, BN, BK, STAGES, PAGE),
            ),
        ],
        [4, 4],
        [216, 72],
    )  # fmt: skip


_multiply = Launcher(_columns_kernel)


def multiply_paged_columns(dy_TN: Tensor, x: PagedRows, ends_G: Tensor) -> Tensor:
    """``dw_GNK[g] = dy[g].T @ x[g]``, zeros for an empty group.

    ``dy_TN`` is aligned, both dtypes are one of :data:`~backstash.kernels.warpgroups.DTYPES`, and
    K is whole chunks.
    """
    rows, K = x.shape
    N, groups = dy_TN.shape[1], ends_G.shape[0]
    half, columns, block = TILE["HALF"], TILE["BN"], values_a_block(dy_TN)
    dw_GNK = new_aligned((groups, N, K), dy_TN)
    pages, host = lookup_of(x)
    _multiply(
        processor_count(dy_TN.device),
        *pages,
        *((None, None) if host is None else host),
        K,
        shared_layout(dy_TN, [1, 1, block, half]),
        ragged(dy_TN, block, columns),
        matrices(dw_GNK, columns // 2, half),
        column_table(ends_G, rows),
        groups,
        ceil_div(K, 2 * half),
        ceil_div(N, columns),
        **TILE,
        BK=block,
        PAGE=x.page_bytes // x.dtype.itemsize,
        num_warps=4,
    )
    return dw_GNK
