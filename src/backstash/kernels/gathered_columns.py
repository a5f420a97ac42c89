"""The gradient of a group's weight from rows that are elsewhere, on a Hopper GPU.

The kernel of :mod:`backstash.kernels.grouped_columns` with another hand at the ring, as in
:mod:`backstash.kernels.gathered_rows`: four warps fetch the operand whose rows are copies of
tokens, or lie in pages, 16 bytes a thread.  The other operand comes by the copy engine.  Both
fill the last block of a group up with zeros.

What is fetched by hand is the narrow side of a tile, as there is half as much of it; where that
is the input, a tile comes out turned and is turned back as it is stored.  Where a row is, is
asked for one block ahead, and used when it has come: each of the four warps has a scheduler to
itself, and few instructions to spare beside the products.  The columns of a tile are a chunk that
lies in one page, so that a row of a block is looked up once.

Letters: T tokens or rows, R rows, N and K columns of the two operands, G groups.
"""

# Gluon's annotations do not say what its compiler takes.
# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import enum
from typing import Any

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

#: Columns of a tile that are fetched by hand: of rows in pages these must lie in one.
CHUNK = 2 * TILE["HALF"]


class Copies(enum.Enum):
    """Which operand's rows are copies of tokens."""

    OF_GRADIENT = "dy"
    OF_INPUT = "x"


@gluon.jit
def _places(o_row, page, device_size, host, PAGE: gl.constexpr):
    """Where values are that have a place in the buffer and whose page has been looked up."""
    o_page = page * PAGE
    if host is not None:
        o_page += gl.where(page < device_size, 0, host)
    return o_page + (o_row % PAGE).to(gl.int64)


@gluon.jit
def _fetch(
    p_values,
    p_source,
    entry,
    first_slot,
    slots,
    device_size,
    host,
    stride,
    columns,
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
    FULL: gl.constexpr,
):
    chunk: gl.constexpr = 2 * HALF
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i_row = gl.arange(0, BK, layout=gl.SliceLayout(1, layout))
    i_column = gl.arange(0, HALF, layout=gl.SliceLayout(0, layout)).expand_dims(0)
    item: gl.constexpr = other_desc.dtype.primitive_bitwidth // 8
    if PAGE:
        # Of a launch without room no row is in a page: all are zeros.
        in_pages = gl.load(p_source + entry) // (stride * item)
        in_pages = gl.where(gl.load(p_source + 2) == 0, in_pages, 0).to(gl.int32)
        p_slots = p_source + slots + gl.load(p_source + first_slot)
    ticket = gl.atomic_add(p_table + 3, 1, sem="relaxed")
    n = 0
    i = 0
    tiles = groups * high * wide
    while ticket < tiles:
        give_ticket(tickets, given, taken, n, ticket, 4)
        start, end, _, i_high, i_wide = locate_tile(p_table, ticket, tiles, high, wide)
        ticket = gl.atomic_add(p_table + 3, 1, sem="relaxed")
        there = end
        column = chunk * i_high
        if PAGE:
            there = gl.minimum(end, in_pages)
            o_row = (start + i_row).to(gl.uint64) * stride.to(gl.uint64) + column
            page = gl.load(p_slots + o_row // PAGE, mask=start + i_row < there, other=0)
        else:
            token = gl.load(p_source + start + i_row, mask=start + i_row < end, other=0)
        for first in range(start, end, BK):
            # Asked for now and used in the next turn: by then it has come.
            m_next = first + BK + i_row < there
            if PAGE:
                place = _places(o_row, page, device_size, host, PAGE)
                o_row += BK * stride
                page = gl.load(p_slots + o_row // PAGE, mask=m_next, other=0)
            else:
                place = token.to(gl.int64) * stride + column
                token = gl.load(p_source + first + BK + i_row, mask=m_next, other=0)
            p_block = p_values + place.expand_dims(1) + i_column
            stage = i % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (i // STAGES & 1) ^ 1)
            mbarrier.expect(bar, BK * BN * item)
            rows = gl.minimum(end - first, BK)
            other_place = [FAR, first + rows, FAR - rows, i_wide * BN]
            async_load(other_desc, other_place, bar, b_smem.index(stage))
            a_high = a_smem.index(2 * stage).reshape([BK, HALF])
            a_low = a_smem.index(2 * stage + 1).reshape([BK, HALF])
            is_whole = first + BK <= there
            if not FULL:
                is_whole = is_whole & (column + chunk <= columns)
            if is_whole:
                async_copy.async_copy_global_to_shared(a_high, p_block)
                async_copy.async_copy_global_to_shared(a_low, p_block + HALF)
            else:
                # What is masked is filled with zeros.
                m_row = (first + i_row < there).expand_dims(1)
                left = columns - column
                if FULL:
                    left = chunk
                m_high, m_low = m_row & (i_column < left), m_row & (i_column + HALF < left)
                async_copy.async_copy_global_to_shared(a_high, p_block, mask=m_high)
                async_copy.async_copy_global_to_shared(a_low, p_block + HALF, mask=m_low)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            i += 1
        n += 1
    give_ticket(tickets, given, taken, n, ticket, 4)


@gluon.jit(
    do_not_specialize=["entry", "first_slot", "slots", "device_size", "groups", "high", "wide"]
)
def _columns_kernel(
    p_values,
    p_source,
    entry,
    first_slot,
    slots,
    device_size,
    host,
    stride,
    columns,
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
    FULL: gl.constexpr,
):
    a_smem = gl.allocate_shared_memory(other_desc.dtype, [2 * STAGES, 1, 1, BK, HALF], a_layout)
    b_smem = gl.allocate_shared_memory(other_desc.dtype, [STAGES, 1, 1, BK, BN], other_desc.layout)
    c_block: gl.constexpr = c_desc.type.block_type.shape
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
                (p_values, p_source, entry, first_slot, slots, device_size, host, stride, columns,
                 other_desc, a_smem, b_smem, full, empty, tickets, given, taken, p_table, groups,
                 high, wide, HALF, BN, BK, STAGES, PAGE, FULL),
            ),
        ],
        [4, 4],
        [216, 72],
    )  # fmt: skip


_multiply = Launcher(_columns_kernel)


def multiply_gathered_columns(
    dy: Tensor, x: Tensor, source_R: Tensor, ends_G: Tensor, copies: Copies
) -> Tensor:
    """``dw_GNK[g] = dy[g].T @ x[g]``, where one operand is ``operand[source_R]``.

    Both are aligned, their dtype is one of :data:`~backstash.kernels.warpgroups.DTYPES`, and an
    empty group gets zeros.
    """
    is_turned = copies is Copies.OF_INPUT
    tokens, other = (x, dy) if is_turned else (dy, x)
    found = tokens, source_R.contiguous(), None, None, None, None, None
    sizes = tokens.stride(0), tokens.shape[1]
    dw_GNK = new_aligned((ends_G.shape[0], dy.shape[1], x.shape[1]), x)
    table = column_table(ends_G, source_R.shape[0])
    _launch((*found, *sizes), other, dw_GNK, table, is_turned=is_turned)
    return dw_GNK


def multiply_paged_columns(dy_TN: Tensor, x: PagedRows, ends_G: Tensor) -> Tensor:
    """``dw_GNK[g] = dy[g].T @ x[g]``, zeros for an empty group.

    ``dy_TN`` is aligned, both dtypes are one of :data:`~backstash.kernels.warpgroups.DTYPES`, and
    K is whole chunks.
    """
    rows, K = x.shape
    pages, host = lookup_of(x)
    found = *pages, *((None, None) if host is None else host)
    dw_GNK = new_aligned((ends_G.shape[0], dy_TN.shape[1], K), dy_TN)
    page = x.page_bytes // x.dtype.itemsize
    table = column_table(ends_G, rows)
    _launch((*found, K, K), dy_TN, dw_GNK, table, is_turned=True, PAGE=page)
    return dw_GNK


def _launch(
    fetched: tuple[Any, ...],
    other: Tensor,
    dw_GNK: Tensor,
    table_G4: Tensor,
    *,
    is_turned: bool,
    PAGE: int = 0,
) -> None:
    """Launch with what is ``fetched`` by hand, its stride and its columns last."""
    half, wide, block, columns = TILE["HALF"], TILE["BN"], values_a_block(other), fetched[-1]
    dw_block = (wide // 2, half) if is_turned else (half, wide // 2)
    _multiply(
        processor_count(other.device),
        *fetched,
        shared_layout(other, [1, 1, block, half]),
        ragged(other, block, wide),
        matrices(dw_GNK, *dw_block),
        table_G4,
        dw_GNK.shape[0],
        ceil_div(columns, CHUNK),
        ceil_div(other.shape[1], wide),
        **TILE,
        BK=block,
        PAGE=PAGE,
        FULL=columns % CHUNK == 0,
        num_warps=4,
    )
