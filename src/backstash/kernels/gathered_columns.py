"""The gradient of a group's weight from rows that are copies of tokens, on a Hopper GPU.

The kernel of :mod:`backstash.kernels.grouped_columns` with another hand at the ring, as in
:mod:`backstash.kernels.gathered_rows`: four warps fetch the operand whose rows are copies, 16 bytes
a thread, and look up the next block's tokens while they ask for this one's.  The other operand
comes by the copy engine.  Both fill the last block of a group up with zeros.

Letters: T tokens, R rows, N and K columns of the two operands, G groups.
"""

# Gluon's annotations do not say what its compiler takes.
# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import enum

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from backstash.kernels.grouped_columns import TILE, locate_tile, multiply_tiles
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


class Copies(enum.Enum):
    """Which operand's rows are copies of tokens."""

    OF_GRADIENT = "dy"
    OF_INPUT = "x"


@gluon.jit
def _places(p_source, first, end, stride, i_row):
    """Where the tokens of a block of rows are; after the group's last row, that row's again."""
    at = gl.maximum(gl.minimum(first + i_row, end - 1), 0)
    return gl.load(p_source + at).to(gl.int64) * stride


@gluon.jit
def _fetch_copies(
    p_copies, place, m_row, column, columns, smem, BK: gl.constexpr, WIDTH: gl.constexpr
):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i_column = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    mask = m_row.expand_dims(1) & (i_column < columns).expand_dims(0)
    p_block = p_copies + place.expand_dims(1) + i_column.expand_dims(0)
    # What is masked is filled with zeros.
    async_copy.async_copy_global_to_shared(smem.reshape([BK, WIDTH]), p_block, mask=mask)


@gluon.jit
def _fetch(
    p_copies,
    p_source,
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
    LEFT: gl.constexpr,
):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i_row = gl.arange(0, BK, layout=gl.SliceLayout(1, layout))
    width: gl.constexpr = BN if LEFT else 2 * HALF
    block_bytes: gl.constexpr = BK * width * other_desc.dtype.primitive_bitwidth // 8
    ticket = gl.atomic_add(p_table + 3, 1, sem="relaxed")
    n = 0
    i = 0
    tiles = groups * high * wide
    while ticket < tiles:
        give_ticket(tickets, given, taken, n, ticket, 4)
        start, end, _, i_high, i_wide = locate_tile(p_table, ticket, tiles, high, wide)
        ticket = gl.atomic_add(p_table + 3, 1, sem="relaxed")
        next_place = _places(p_source, start, end, stride, i_row)
        for first in range(start, end, BK):
            place = next_place
            next_place = _places(p_source, first + BK, end, stride, i_row)
            m_row = first + i_row < end
            stage = i % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (i // STAGES & 1) ^ 1)
            mbarrier.expect(bar, block_bytes)
            rows = gl.minimum(end - first, BK)
            stop, far = first + rows, FAR - rows
            column = i_high * 2 * HALF
            a_high, a_low = a_smem.index(2 * stage), a_smem.index(2 * stage + 1)
            b = b_smem.index(stage)
            if LEFT:
                async_load(other_desc, [FAR, stop, far, i_wide * BN], bar, b)
                _fetch_copies(p_copies, place, m_row, column, columns, a_high, BK, HALF)
                _fetch_copies(p_copies, place, m_row, column + HALF, columns, a_low, BK, HALF)
            else:
                async_load(other_desc, [FAR, stop, far, column], bar, a_high)
                async_load(other_desc, [FAR, stop, far, column + HALF], bar, a_low)
                _fetch_copies(p_copies, place, m_row, i_wide * BN, columns, b, BK, BN)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            i += 1
        n += 1
    give_ticket(tickets, given, taken, n, ticket, 4)


@gluon.jit(do_not_specialize=["groups", "high", "wide"])
def _columns_kernel(
    p_copies,
    p_source,
    stride,
    columns,
    a_layout: gl.constexpr,
    b_layout: gl.constexpr,
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
    LEFT: gl.constexpr,
):
    a_smem = gl.allocate_shared_memory(other_desc.dtype, [2 * STAGES, 1, 1, BK, HALF], a_layout)
    b_smem = gl.allocate_shared_memory(other_desc.dtype, [STAGES, 1, 1, BK, BN], b_layout)
    c_block: gl.constexpr = [1, HALF, BN // 2]
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
                (p_copies, p_source, stride, columns, other_desc, a_smem, b_smem, full, empty,
                 tickets, given, taken, p_table, groups, high, wide, HALF, BN, BK, STAGES, LEFT),
            ),
        ],
        [4, 4],
        [216, 72],
    )  # fmt: skip


def multiply_gathered_columns(
    dy: Tensor, x: Tensor, source_R: Tensor, ends_G: Tensor, copies: Copies
) -> Tensor:
    """``dw_GNK[g] = dy[g].T @ x[g]``, where one operand is ``operand[source_R]``.

    Both are aligned, their dtype is one of :data:`~backstash.kernels.warpgroups.DTYPES`, and an
    empty group gets zeros.
    """
    N, K, is_left = dy.shape[1], x.shape[1], copies is Copies.OF_GRADIENT
    half, columns, block = TILE["HALF"], TILE["BN"], values_a_block(x)
    tokens, other = (dy, x) if is_left else (x, dy)
    dw_GNK = new_aligned((len(ends_G), N, K), x)
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    _columns_kernel[(programs,)](
        tokens,
        source_R.contiguous(),
        tokens.stride(0),
        tokens.shape[1],
        shared_layout(x, [1, 1, block, half]),
        shared_layout(x, [1, 1, block, columns]),
        ragged(other, block, columns if is_left else half),
        matrices(dw_GNK, half, columns // 2),
        column_table(ends_G, source_R.shape[0]),
        len(ends_G),
        triton.cdiv(N, 2 * half),
        triton.cdiv(K, columns),
        **TILE,
        BK=block,
        LEFT=is_left,
        num_warps=4,
    )
    return dw_GNK
