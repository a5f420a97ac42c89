"""The gradient of a group's weight on a Hopper GPU: ``dw[g] = dy[g].T @ x[g]``.

The sum goes over the rows of a group, so a tile takes as long as its group has rows.  Tiles of
the largest group are given out first (:mod:`backstash.kernels.tiles`), and those of the empty
groups last: they are stored as the zeros that they start as.

The last block of a group's rows is filled up with zeros by the copy engine, in both operands,
so that no row of another group, nor of the tail, gets near the sum.

Float8 codes are turned: a tensor core takes them with what is added up side by side.  Their
scales are multiplied onto the finished sums.

Letters: T rows, N and K columns of the two operands, G groups, P columns of
turned operands.
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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from backstash.device import processor_count
from backstash.kernels.carriers import REGISTERS, carried_by, carry
from backstash.kernels.launches import Launcher
from backstash.kernels.reference.float8_mm import Scaled
from backstash.kernels.sizes import ceil_div
from backstash.kernels.tables import column_table
from backstash.kernels.warpgroups import (
    FAR,
    TURNS,
    UNIT,
    async_load,
    give_ticket,
    load_scales,
    matrices,
    multiply,
    multiply_by_scales,
    multiply_exactly,
    new_aligned,
    new_ring,
    ragged,
    ragged_columns,
    stages_for,
    store_block,
    take_ticket,
    values_a_block,
)

TILE: dict[str, Any] = {"HALF": 64, "BN": 256, "STAGES": 4}


@gluon.jit
def locate_tile(p_table, ticket, tiles, high, wide):
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
    TURNED: gl.constexpr,
):
    block_bytes: gl.constexpr = BK * (2 * HALF + BN) * a_desc.dtype.primitive_bitwidth // 8
    ticket = gl.atomic_add(p_table + 3, 1, sem="relaxed")
    n = 0
    i = 0
    tiles = groups * high * wide
    while ticket < tiles:
        give_ticket(tickets, given, taken, n, ticket, 1)
        start, end, _, i_high, i_wide = locate_tile(p_table, ticket, tiles, high, wide)
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
            if TURNED:
                stop = stop // UNIT
                async_load(a_desc, [TURNS, stop, column, place], bar, a_smem.index(2 * stage))
                async_load(a_desc, [TURNS, stop, column + HALF, place], bar, a_low)
                async_load(b_desc, [TURNS, stop, i_wide * BN, place], bar, b_smem.index(stage))
            else:
                async_load(a_desc, [FAR, stop, place, column], bar, a_smem.index(2 * stage))
                async_load(a_desc, [FAR, stop, place, column + HALF], bar, a_low)
                async_load(b_desc, [FAR, stop, place, i_wide * BN], bar, b_smem.index(stage))
            i += 1
        n += 1
    give_ticket(tickets, given, taken, n, ticket, 1)


@gluon.jit
def multiply_tiles(
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
    p_a_scale,
    p_b_scale,
    groups,
    high,
    wide,
    half: gl.constexpr,
    HALF: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    TURNED: gl.constexpr,
    EXACT: gl.constexpr,
    BY_THREADS: gl.constexpr,
):
    """Multiply one half of each tile of this program, and store it."""
    n = 0
    i = 0
    tiles = groups * high * wide
    ticket = take_ticket(tickets, given, taken, n)
    start, end, group, i_high, i_wide = locate_tile(p_table, ticket, tiles, high, wide)
    while ticket < tiles:
        steps = (end - start + BK - 1) // BK
        if p_a_scale is not None:
            row, column = (2 * i_high + half) * HALF, i_wide * BN
            M, columns = c_desc.shape[1], c_desc.shape[2]
            a_scale = load_scales(p_a_scale + group * M + row, M - row, HALF)
            b_scale = load_scales(p_b_scale + group * columns + column, columns - column, BN)
        if EXACT:
            total = multiply_exactly(
                a_smem, b_smem, full, empty, i, steps, half, HALF, BN, BK, STAGES, BY_THREADS
            )
        else:
            total = multiply(
                a_smem,
                b_smem,
                full,
                empty,
                i,
                steps,
                half,
                HALF,
                BN,
                BK,
                STAGES,
                TURNED,
                TURNED,
                BY_THREADS,
            )
        if p_a_scale is not None:
            total = multiply_by_scales(total, a_scale, b_scale)
        i += steps
        n += 1
        matrix, row, column = group, (2 * i_high + half) * HALF, i_wide * BN
        # The next tile is looked up before this one is stored: storing hides how long it takes.
        ticket = take_ticket(tickets, given, taken, n)
        start, end, group, i_high, i_wide = locate_tile(p_table, ticket, tiles, high, wide)
        store_block(c_desc, c_smem, total, matrix, row, column, HALF, BN)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["groups", "high", "wide"])
def _columns_kernel(
    a_desc,
    b_desc,
    c_desc,
    p_table,
    p_a_scale,
    p_b_scale,
    p_moves,
    p_base,
    groups,
    high,
    wide,
    HALF: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    TURNED: gl.constexpr,
    EXACT: gl.constexpr,
    PARTS: gl.constexpr,
):
    a_block: gl.constexpr = [HALF, BK] if TURNED else [BK, HALF]
    b_block: gl.constexpr = [BN, BK] if TURNED else [BK, BN]
    a_blocks: gl.constexpr = [2 * STAGES, 1, 1, a_block[0], a_block[1]]
    b_blocks: gl.constexpr = [STAGES, 1, 1, b_block[0], b_block[1]]
    a_smem = gl.allocate_shared_memory(a_desc.dtype, a_blocks, a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, b_blocks, b_desc.layout)
    c_block: gl.constexpr = [1, HALF, BN // 2]
    c_high = gl.allocate_shared_memory(c_desc.dtype, c_block, c_desc.layout)
    c_low = gl.allocate_shared_memory(c_desc.dtype, c_block, c_desc.layout)
    full, empty, tickets, given, taken = new_ring(STAGES, 1)
    if p_moves is None:
        gl.warp_specialize(
            [
                (
                    multiply_tiles,
                    (c_desc, a_smem, b_smem, c_high, full, empty, tickets, given, taken, p_table,
                     p_a_scale, p_b_scale, groups, high, wide, 0, HALF, BN, BK, STAGES, TURNED,
                     EXACT, False),
                ),
                (
                    multiply_tiles,
                    (c_desc, a_smem, b_smem, c_low, full, empty, tickets, given, taken, p_table,
                     p_a_scale, p_b_scale, groups, high, wide, 1, HALF, BN, BK, STAGES, TURNED,
                     EXACT, False),
                ),
                (
                    _fetch,
                    (a_desc, b_desc, a_smem, b_smem, full, empty, tickets, given, taken, p_table,
                     groups, high, wide, HALF, BN, BK, STAGES, TURNED),
                ),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    multiply_tiles,
                    (c_desc, a_smem, b_smem, c_high, full, empty, tickets, given, taken, p_table,
                     p_a_scale, p_b_scale, groups, high, wide, 0, HALF, BN, BK, STAGES, TURNED,
                     EXACT, False),
                ),
                (
                    multiply_tiles,
                    (c_desc, a_smem, b_smem, c_low, full, empty, tickets, given, taken, p_table,
                     p_a_scale, p_b_scale, groups, high, wide, 1, HALF, BN, BK, STAGES, TURNED,
                     EXACT, False),
                ),
                (
                    _fetch,
                    (a_desc, b_desc, a_smem, b_smem, full, empty, tickets, given, taken, p_table,
                     groups, high, wide, HALF, BN, BK, STAGES, TURNED),
                ),
                (carry, (p_moves, p_base, p_table + 3, groups * high * wide, PARTS)),
            ],
            [4, 1, 1],
            REGISTERS,
        )  # fmt: skip


_multiply = Launcher(_columns_kernel)


def multiply_columns(dy_TN: Tensor, x_TK: Tensor, ends_G: Tensor) -> Tensor:
    """``dw_GNK[g] = dy[g].T @ x[g]``, zeros for an empty group.

    Both are aligned, and their dtype is one of :data:`~backstash.kernels.warpgroups.DTYPES`.
    """
    block, N, K = values_a_block(x_TK), dy_TN.shape[1], x_TK.shape[1]
    dw_GNK = new_aligned((ends_G.shape[0], N, K), x_TK)
    descs = ragged(dy_TN, block, TILE["HALF"]), ragged(x_TK, block, TILE["BN"])
    _launch(descs, column_table(ends_G, x_TK.shape[0]), dw_GNK, (None, None), BK=block)
    return dw_GNK


def multiply_scaled_columns(
    dy: Scaled, x: Scaled, padded_ends_G: Tensor, dtype: torch.dtype
) -> Tensor:
    """``dw_GNK[g] = dy[g] @ x[g].T`` of turned float8 codes, zeros for an empty group.

    As :func:`~backstash.kernels.reference.float8_mm.float8_grouped_mm_dw` has them, and aligned.
    """
    block, (N, P), K = values_a_block(x.codes), dy.codes.shape, x.codes.shape[0]
    dw_GNK = new_aligned((padded_ends_G.shape[0], N, K), x.codes, dtype)
    descs = (
        ragged_columns(dy.codes, TILE["HALF"], block),
        ragged_columns(x.codes, TILE["BN"], block),
    )
    scales = dy.scale_inv.contiguous(), x.scale_inv.contiguous()
    _launch(descs, column_table(padded_ends_G, P), dw_GNK, scales, BK=block)
    return dw_GNK


def _launch(
    descs: tuple[Any, Any],
    table_G4: Tensor,
    dw_GNK: Tensor,
    scales: tuple[Tensor, Tensor] | tuple[None, None],
    *,
    BK: int,
) -> None:
    groups, N, K = dw_GNK.shape
    half, columns = TILE["HALF"], TILE["BN"]
    is_codes = scales[0] is not None
    *moves, parts = carried_by(is_plain=scales[0] is None)
    _multiply(
        processor_count(dw_GNK.device),
        *descs,
        matrices(dw_GNK, half, columns // 2),
        table_G4,
        *scales,
        *moves,
        groups,
        ceil_div(N, 2 * half),
        ceil_div(K, columns),
        **stages_for(dw_GNK, TILE),
        BK=BK,
        TURNED=is_codes,
        EXACT=is_codes,
        PARTS=parts,
        num_warps=4,
    )
