"""Rows times the weight of their group on a Hopper GPU: ``y`` and ``dx`` of a grouped product.

The table of :mod:`backstash.kernels.blocks` cuts the rows into blocks that never hold rows of
two groups.  A tile is such a block times BN columns.  Tiles are given out in patches of a few
blocks of rows by all columns, so that the weights and the rows that neighbouring processors
read are the same ones, and come from the cache.

The last block of a group reads rows of the next group as well, which spoils nothing: a row of
the result depends on its own row only, and only the group's rows are stored.  The tail is a
group without weights: its tiles are stored as the zeros that they start as.

Float8 rows and weights have scales besides, which are multiplied onto the finished sums.

Letters: T rows, J columns of the rows, C columns of the result, G groups.
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
from backstash.kernels.tables import row_table
from backstash.kernels.warpgroups import (
    async_load,
    give_ticket,
    load_row_scales,
    load_scales,
    matrices,
    matrix,
    multiply,
    multiply_by_scales,
    multiply_exactly,
    new_aligned,
    new_ring,
    pass_over,
    ragged,
    stages_for,
    store_rows,
    take_ticket,
    values_a_block,
)

TILE: dict[str, Any] = {"HALF": 64, "BN": 256, "STAGES": 4, "PATCH": 8}


@gluon.jit
def locate_tile(p_table, ticket, used, chunks, PATCH: gl.constexpr):
    """The rows, the group and the column block of a tile; of the last, where there is no more."""
    ticket = gl.minimum(ticket, used * chunks - 1)
    first_block = ticket // (PATCH * chunks) * PATCH
    height = gl.minimum(used - first_block, PATCH)
    place = ticket % (PATCH * chunks)
    p_entry = p_table + (first_block + place % height) * 4
    return gl.load(p_entry), gl.load(p_entry + 1), gl.load(p_entry + 2), place // height


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
    block_bytes: gl.constexpr = BK * a_desc.dtype.primitive_bitwidth // 8
    ticket = gl.atomic_add(p_table + 7, 1, sem="relaxed")
    n = 0
    i = 0
    while ticket < used * chunks:
        give_ticket(tickets, given, taken, n, ticket, 1)
        first, end, group, chunk = locate_tile(p_table, ticket, used, chunks, PATCH)
        has_low = end > first + HALF
        steps = gl.where(group < groups, (inner + BK - 1) // BK, 0)
        ticket = gl.atomic_add(p_table + 7, 1, sem="relaxed")
        for step in range(steps):
            stage = (i + step) % STAGES
            k = step * BK
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), ((i + step) // STAGES & 1) ^ 1)
            mbarrier.expect(bar, (2 * HALF + BN) * block_bytes, pred=has_low)
            mbarrier.expect(bar, (HALF + BN) * block_bytes, pred=first + HALF >= end)
            p_low = a_smem.index(2 * stage + 1)
            async_load(a_desc, [first, k], bar, a_smem.index(2 * stage))
            async_load(a_desc, [first + HALF, k], bar, p_low, pred=has_low)
            place = [group, chunk * BN, k] if B_ROWS else [group, k, chunk * BN]
            async_load(b_desc, place, bar, b_smem.index(stage))
        i += steps
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
    p_source,
    p_a_scale,
    p_b_scale,
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
    B_ROWS: gl.constexpr,
    EXACT: gl.constexpr,
    BY_THREADS: gl.constexpr,
):
    """Multiply one half of each tile of this program, and store it."""
    n = 0
    i = 0
    ticket = take_ticket(tickets, given, taken, n)
    first, end, group, chunk = locate_tile(p_table, ticket, used, chunks, PATCH)
    while ticket < used * chunks:
        steps = gl.where(group < groups, (inner + BK - 1) // BK, 0)
        first += half * HALF
        rows = gl.minimum(end - first, HALF)
        i += steps
        n += 1
        if rows > 0:
            if p_a_scale is not None:
                # The tail has no scales either.
                columns = c_desc.shape[3]
                left = gl.where(group < groups, columns - chunk * BN, 0)
                p_line = p_b_scale + group * columns + chunk * BN
                there = gl.where(group < groups, rows, 0)
                a_scale = load_row_scales(p_a_scale, p_source, first, there, HALF)
                b_scale = load_scales(p_line, left, BN)
            if EXACT:
                total = multiply_exactly(
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
                    BY_THREADS,
                )
            else:
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
                    B_ROWS,
                    BY_THREADS,
                )
            if p_a_scale is not None:
                total = multiply_by_scales(total, a_scale, b_scale)
            stop, column = first + rows, chunk * BN
            # The next tile is looked up before this one is stored: storing hides how long it takes.
            ticket = take_ticket(tickets, given, taken, n)
            first, end, group, chunk = locate_tile(p_table, ticket, used, chunks, PATCH)
            store_rows(c_desc, c_smem, total, stop, rows, column, HALF, BN)
        else:
            pass_over(full, empty, i - steps, steps, STAGES)
            ticket = take_ticket(tickets, given, taken, n)
            first, end, group, chunk = locate_tile(p_table, ticket, used, chunks, PATCH)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["groups", "inner", "chunks"])
def _rows_kernel(
    a_desc,
    b_desc,
    c_desc,
    p_table,
    p_a_scale,
    p_b_scale,
    p_moves,
    p_base,
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
    PARTS: gl.constexpr,
):
    used = gl.load(p_table + 3)
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [2 * STAGES, HALF, BK], a_desc.layout)
    b_blocks: gl.constexpr = [STAGES, 1, BN, BK] if B_ROWS else [STAGES, 1, BK, BN]
    b_smem = gl.allocate_shared_memory(b_desc.dtype, b_blocks, b_desc.layout)
    c_block: gl.constexpr = [1, 1, HALF, BN // 2]
    c_high = gl.allocate_shared_memory(c_desc.dtype, c_block, c_desc.layout)
    c_low = gl.allocate_shared_memory(c_desc.dtype, c_block, c_desc.layout)
    full, empty, tickets, given, taken = new_ring(STAGES, 1)
    if p_moves is None:
        gl.warp_specialize(
            [
                (
                    multiply_tiles,
                    (c_desc, a_smem, b_smem, c_high, full, empty, tickets, given, taken, p_table,
                     None, p_a_scale, p_b_scale, groups, inner, used, chunks, 0, HALF, BN, BK,
                     STAGES, PATCH, B_ROWS, EXACT, False),
                ),
                (
                    multiply_tiles,
                    (c_desc, a_smem, b_smem, c_low, full, empty, tickets, given, taken, p_table,
                     None, p_a_scale, p_b_scale, groups, inner, used, chunks, 1, HALF, BN, BK,
                     STAGES, PATCH, B_ROWS, EXACT, False),
                ),
                (
                    _fetch,
                    (a_desc, b_desc, a_smem, b_smem, full, empty, tickets, given, taken, p_table,
                     groups, inner, used, chunks, HALF, BN, BK, STAGES, PATCH, B_ROWS),
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
                     None, p_a_scale, p_b_scale, groups, inner, used, chunks, 0, HALF, BN, BK,
                     STAGES, PATCH, B_ROWS, EXACT, False),
                ),
                (
                    multiply_tiles,
                    (c_desc, a_smem, b_smem, c_low, full, empty, tickets, given, taken, p_table,
                     None, p_a_scale, p_b_scale, groups, inner, used, chunks, 1, HALF, BN, BK,
                     STAGES, PATCH, B_ROWS, EXACT, False),
                ),
                (
                    _fetch,
                    (a_desc, b_desc, a_smem, b_smem, full, empty, tickets, given, taken, p_table,
                     groups, inner, used, chunks, HALF, BN, BK, STAGES, PATCH, B_ROWS),
                ),
                (carry, (p_moves, p_base, p_table + 7, used * chunks, PARTS)),
            ],
            [4, 1, 1],
            REGISTERS,
        )  # fmt: skip


_multiply = Launcher(_rows_kernel)


def multiply_rows(a_TJ: Tensor, b: Tensor, ends_G: Tensor, *, is_turned: bool = False) -> Tensor:
    """Multiply each row from the right by its group's matrix; zeros in the tail.

    ``b`` is ``(G, J, C)``, or turned, ``(G, C, J)``.  Both are aligned, and their dtype is one of
    :data:`~backstash.kernels.warpgroups.DTYPES`.
    """
    y_TC = new_aligned((a_TJ.shape[0], b.shape[1] if is_turned else b.shape[2]), a_TJ)
    columns, block = TILE["BN"], values_a_block(a_TJ)
    b_desc = matrices(b, columns, block) if is_turned else matrices(b, block, columns)
    _launch(a_TJ, b_desc, ends_G, y_TC)
    return y_TC


def multiply_scaled_rows(
    a: Scaled, b: Scaled, ends_G: Tensor, dtype: torch.dtype, *, fast_accumulation: bool
) -> Tensor:
    """Multiply each row of float8 codes by its group's ``b^T``, in ``dtype``; zeros in the tail.

    As :func:`~backstash.kernels.reference.float8_mm.float8_grouped_mm` has them, and aligned.
    """
    y_TC = new_aligned((a.codes.shape[0], b.codes.shape[1]), a.codes, dtype)
    scales = a.scale_inv.contiguous(), b.scale_inv.contiguous()
    b_desc = matrices(b.codes, TILE["BN"], values_a_block(b.codes))
    _launch(a.codes, b_desc, ends_G, y_TC, scales, is_exact=not fast_accumulation)
    return y_TC


def _launch(
    a_TJ: Tensor,
    b_desc: Any,
    ends_G: Tensor,
    y_TC: Tensor,
    scales: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
    *,
    is_exact: bool = False,
) -> None:
    (T, J), C = a_TJ.shape, y_TC.shape[1]
    half, columns, block = TILE["HALF"], TILE["BN"], values_a_block(a_TJ)
    *moves, parts = carried_by(is_plain=scales[0] is None)
    _multiply(
        processor_count(a_TJ.device),
        matrix(a_TJ, half, block),
        b_desc,
        ragged(y_TC, half, columns // 2),
        row_table(ends_G, T, 2 * half),
        *scales,
        *moves,
        ends_G.shape[0],
        J,
        ceil_div(C, columns),
        **stages_for(y_TC, TILE),
        BK=block,
        B_ROWS=b_desc.block_shape[-1] == block,
        EXACT=is_exact,
        PARTS=parts,
        num_warps=4,
    )
