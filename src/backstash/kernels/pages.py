"""Buffers into pages and back on a GPU; what each operation means is in its reference twin.

One launch does a whole batch of buffers.  Every program reads the heads of the free list and
the counts, so each knows without asking where every page goes.  The parts of all buffers are
numbered through, so that a small buffer costs one part and not a launch, and a program takes one
after the other: where parts are large, by asking for the next number, because memory is fastest
when what is read and written at one time lies close together; where they are small and there are
many, in turn, because asking would take longer than moving one.  The new heads are written when
the last program has asked: until then every one, however late it starts, must find the old ones.

How a part moves is in ``page_parts.py``.  Whether it lies in a page of the device or of the
host, and whether there is anything to copy at all, is told by addresses and masks, not by
branches: each branch would be one more copy of the loop, with registers of its own, and fewer
programs would fit on a processor.
"""

# The type checker knows neither launch options nor loops that Triton unrolls.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from backstash.errors import LayoutError
from backstash.kernels.free_pages import (
    BYTES_RESTORED,
    HEADER,
    NUMBERS_GIVEN,
    RESTORING,
    commit,
    is_last,
    page_address,
    page_at,
    read_number,
    read_pool,
    release,
    ring_places,
    written,
)
from backstash.kernels.launches import Launcher
from backstash.kernels.moves import begin_moves, page_of, write_moves
from backstash.kernels.page_parts import AHEAD, LINE, fetch_ahead, part_in, part_out
from backstash.kernels.page_shapes import LaunchShape
from backstash.kernels.reference.moves import Moves
from backstash.kernels.reference.pages import MOST_RELEASED


def stash_pages(
    sources: Sequence[Tensor],
    rows: Sequence[Tensor],
    widths: Sequence[int],
    table: Tensor,
    device_pages: Tensor,
    host_pages: Tensor,
    free_N: Tensor,
    state: Tensor,
    receipt: Tensor,
    *,
    page_bytes: int,
    number: int,
    moves: Moves | None = None,
    programs: int | None = None,
) -> None:
    """Put the valid prefix of each source into pages, in one launch of at most 8 buffers."""
    shape = LaunchShape.of(sources, page_bytes, leaving=moves is not None)
    _launch_stash(
        _at_most(programs, shape),
        tuple(sources),
        tuple(rows),
        written(widths),
        written([source.numel() // w for source, w in zip(sources, widths, strict=True)]),
        table,
        device_pages,
        host_pages,
        free_N,
        state,
        receipt,
        None if moves is None else moves.list_N,
        device_pages.numel() // page_bytes,
        host_pages.numel() // page_bytes,
        number,
        BUFFERS=len(sources),
        PAGE=page_bytes,
        PAYLOADS=shape.payloads,
        PARTS=shape.parts,
        WORDS=shape.in_words,
        LEFT=shape.left,
        ASK=shape.footprint.asks,
        num_warps=shape.footprint.warps,
        maxnreg=shape.footprint.registers,
    )


def restore_pages(
    destinations: Sequence[Tensor],
    places: Sequence[int],
    table: Tensor,
    device_pages: Tensor,
    host_pages: Tensor,
    state: Tensor,
    *,
    buffers: int,
    page_bytes: int,
    moves: Moves | None = None,
    programs: int | None = None,
) -> None:
    """Bring the valid prefix of some buffers of a launch back, in one launch."""
    shape = LaunchShape.of(destinations, page_bytes, leaving=moves is not None)
    _launch_restore(
        _at_most(programs, shape),
        tuple(destinations),
        written(places),
        written([destination.numel() for destination in destinations]),
        table,
        device_pages,
        host_pages,
        state,
        None if moves is None else moves.list_N,
        device_pages.numel() // page_bytes,
        GIVEN=len(destinations),
        BUFFERS=buffers,
        PAGE=page_bytes,
        PAYLOADS=shape.payloads,
        PARTS=shape.parts,
        WORDS=shape.in_words,
        LEFT=shape.left,
        ASK=shape.footprint.asks,
        num_warps=shape.footprint.warps,
        maxnreg=shape.footprint.registers,
    )


def _at_most(programs: int | None, shape: LaunchShape) -> int:
    """The programs of a launch, where it may have so many of 16 warps."""
    if programs is None:
        return shape.programs
    return min(shape.programs, programs * 16 // shape.footprint.warps)


def release_pages(
    tables: Sequence[Tensor],
    free_N: Tensor,
    state: Tensor,
    *,
    buffers: Sequence[int],
    device_size: int,
) -> None:
    """Give the pages of some launches back; one program, so that nobody sees a tail too early."""
    if not 1 <= len(tables) <= MOST_RELEASED:
        raise LayoutError(
            f"pages of 1 to {MOST_RELEASED} launches are given back at once, got {len(tables)}; "
            "split them"
        )
    # Two kernels are compiled: one for one table, one for as many as there can be.
    more = 0 if len(tables) == 1 else MOST_RELEASED - len(tables)
    _launch_release(
        1,
        (*tables, *tables[:1] * more),
        written([*buffers, *[0] * more]),
        free_N,
        state,
        device_size,
        free_N.numel() - device_size,
        TABLES=len(tables) + more,
        BLOCK=1024,
        num_warps=4,
    )


@triton.jit
def _valid_length(p_rows, capacity_rows, width):
    """Valid elements of a buffer: a count past the buffer must not be believed."""
    count = tl.load(p_rows).to(tl.int64)
    return tl.minimum(tl.maximum(count, 0), read_number(capacity_rows)) * read_number(width)


@triton.jit
def _item_bytes(p_values):
    return p_values.dtype.element_ty.primitive_bitwidth // 8


@triton.jit(do_not_specialize=["device_size", "host_size", "number"])
def _stash(
    p_sources,
    p_rows,
    widths,
    capacity_rows,
    p_table,
    p_device,
    p_host,
    p_free,
    p_state,
    p_receipt,
    p_moves,
    device_size,
    host_size,
    number,
    BUFFERS: tl.constexpr,
    PAGE: tl.constexpr,
    PAYLOADS: tl.constexpr,
    PARTS: tl.constexpr,
    WORDS: tl.constexpr,
    LEFT: tl.constexpr,
    ASK: tl.constexpr,
):
    is_bytes: tl.constexpr = WORDS and p_sources[0].dtype.element_ty == tl.uint8
    if AHEAD and is_bytes and LEFT[0] == 0 and PARTS[0] >= LINE:
        # A program's first part is known before the counts are, if it is in the first buffer.
        end = (tl.program_id(0) + 1).to(tl.int64) * PARTS[0]
        is_there = end <= read_number(capacity_rows[0]) * read_number(widths[0])
        fetch_ahead(p_sources[0] + end - PARTS[0], is_there, PARTS[0])
    head_device, head_host, free_device, free_host = read_pool(p_state)
    # Numbers of pages and parts fit into 32 bits, which halves what a loop keeps in registers.
    total = 0
    for i in tl.static_range(BUFFERS):
        length = _valid_length(p_rows[i], capacity_rows[i], widths[i])
        total += tl.cdiv(length, PAYLOADS[i]).to(tl.int32)
    from_device = tl.minimum(total, free_device).to(tl.int32)
    fits = total - from_device <= free_host
    sizes = (device_size, host_size)
    rings = ring_places(head_device, head_host, sizes)

    lookup = (p_free, from_device, rings, sizes, p_device, p_host)
    p_given = p_state + NUMBERS_GIVEN
    taken = tl.program_id(0)
    first, parts_before, moves_before = 0, 0, 0
    bytes_stashed = tl.full((), 0, tl.int64)
    for i in tl.static_range(BUFFERS):
        length = _valid_length(p_rows[i], capacity_rows[i], widths[i])
        nbytes = length * _item_bytes(p_sources[i])
        if tl.program_id(0) == 0:
            tl.store(p_table + HEADER + i, nbytes)
            tl.store(p_table + HEADER + BUFFERS + i, first)
        parts = tl.where(fits, tl.cdiv(length, PARTS[i]), 0).to(tl.int32)
        skipped = 0
        if LEFT[i]:
            skipped = tl.where(fits, length // PAGE, 0).to(tl.int32)
            for o_page in range(tl.program_id(0) * 128, skipped, tl.num_programs(0) * 128):
                i_page = tl.minimum(o_page + tl.arange(0, 128), skipped - 1)
                pages = page_at(p_free, first + i_page, from_device, rings, sizes)
                tl.store(p_table + HEADER + 2 * BUFFERS + first + i_page, pages)
                p_pages = page_address(p_device, p_host, pages, device_size, PAGE)
                p_froms = page_of(p_sources[i], i_page, PAGE)
                write_moves(p_moves, moves_before + i_page, p_froms, p_pages, p_device)
            moves_before += skipped
            skipped *= PAGE // PARTS[i]
            parts -= skipped
        while taken < parts_before + parts:
            i_part = taken - parts_before + skipped
            slot = first + i_part // (PAYLOADS[i] // PARTS[i])
            in_page = i_part % (PAYLOADS[i] // PARTS[i])
            before = tl.full((), PARTS[i], tl.int64) * i_part
            left = length - before
            p_from = p_sources[i] + before
            place = (slot, in_page)
            taken, page = part_in(
                p_from, lookup, place, left, taken, p_given, PAGE, PAYLOADS[i], PARTS[i], WORDS, ASK
            )
            if in_page == 0:
                tl.store(p_table + HEADER + 2 * BUFFERS + slot, page)
        parts_before += parts
        bytes_stashed += nbytes
        first += tl.cdiv(length, PAYLOADS[i]).to(tl.int32)

    begin_moves(p_moves, moves_before, PAGE)
    if is_last(taken, parts_before, p_given, ASK):
        commit(p_state, p_table, p_receipt, sizes, total, bytes_stashed, number)


@triton.jit(do_not_specialize=["device_size"])
def _restore(
    p_destinations,
    places,
    capacities,
    p_table,
    p_device,
    p_host,
    p_state,
    p_moves,
    device_size,
    GIVEN: tl.constexpr,
    BUFFERS: tl.constexpr,
    PAGE: tl.constexpr,
    PAYLOADS: tl.constexpr,
    PARTS: tl.constexpr,
    WORDS: tl.constexpr,
    LEFT: tl.constexpr,
    ASK: tl.constexpr,
):
    missing = tl.load(p_table + 2)
    p_given = p_table + RESTORING
    taken = tl.program_id(0)
    parts_before, moves_before = 0, 0
    bytes_restored = tl.full((), 0, tl.int64)
    for i in tl.static_range(GIVEN):
        p_entry = p_table + HEADER + read_number(places[i])
        length = tl.load(p_entry) // _item_bytes(p_destinations[i])
        length = tl.minimum(length, read_number(capacities[i]))
        p_pages = p_table + HEADER + 2 * BUFFERS + tl.load(p_entry + BUFFERS)
        parts = tl.cdiv(length, PARTS[i]).to(tl.int32)
        skipped = 0
        if LEFT[i]:
            skipped = tl.where(missing == 0, length // PAGE, 0).to(tl.int32)
            for o_page in range(tl.program_id(0) * 128, skipped, tl.num_programs(0) * 128):
                i_page = tl.minimum(o_page + tl.arange(0, 128), skipped - 1)
                pages = tl.load(p_pages + i_page)
                p_froms = page_address(p_device, p_host, pages, device_size, PAGE)
                p_tos = page_of(p_destinations[i], i_page, PAGE)
                write_moves(p_moves, moves_before + i_page, p_froms, p_tos, p_device)
            moves_before += skipped
            skipped *= PAGE // PARTS[i]
            parts -= skipped
        while taken < parts_before + parts:
            i_part = taken - parts_before + skipped
            # After an overflow the slots say nothing, but they may be read.
            page = tl.load(p_pages + i_part // (PAYLOADS[i] // PARTS[i]))
            p_page = page_address(p_device, p_host, page, device_size, PAGE)
            in_page = i_part % (PAYLOADS[i] // PARTS[i])
            before = tl.full((), PARTS[i], tl.int64) * i_part
            left = length - before
            p_to = p_destinations[i] + before
            lengths = (left, tl.where(missing == 0, left, 0))
            taken = part_out(
                p_page, p_to, in_page, lengths, taken, p_given, PAYLOADS[i], PARTS[i], WORDS, ASK
            )
        parts_before += parts
        bytes_restored += length * _item_bytes(p_destinations[i])
    begin_moves(p_moves, moves_before, PAGE)
    if is_last(taken, parts_before, p_given, ASK):
        tl.store(p_given, 0)
        if missing == 0:
            tl.atomic_add(p_state + BYTES_RESTORED, bytes_restored)


_launch_stash, _launch_restore, _launch_release = map(Launcher, (_stash, _restore, release))
