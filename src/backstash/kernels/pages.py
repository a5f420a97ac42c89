"""Bytes into pages and back on a GPU; what each operation means is in its reference twin.

One launch does a whole batch of buffers.  Every program reads the heads of the free list and
the counts, so each knows without asking where every page goes; the programs then take blocks
of bytes in turn, over all the buffers, so that a small buffer costs one block and not a launch.
The new heads are written by the last program to finish: until then every program, however late
it starts, must find the old ones.

Bytes move as words of four, sixteen bytes to a thread, where the addresses allow it; the bytes
of a last block that is not full move one by one.

Letters: B buffers of a launch, N pages of both tiers.
"""

# The type checker knows neither launch options nor loops that Triton unrolls.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.errors import LayoutError
from backstash.kernels.reference import pages as reference
from backstash.kernels.reference.pages import MOST_BUFFERS, PoolState

MOST_BLOCK_BYTES, LEAST_BLOCK_BYTES = 16384, 4096
NUM_WARPS = 8
PROGRAMS_PER_PROCESSOR = 8
_VECTOR = 16

HEADER = tl.constexpr(reference.TABLE_HEADER)
RECEIPT_OVERFLOW = tl.constexpr(reference.RECEIPT_OVERFLOW)
HOST_SHIFT = tl.constexpr(reference.RECEIPT_HOST_SHIFT)
HEAD_DEVICE = tl.constexpr(int(PoolState.HEAD_DEVICE))
HEAD_HOST = tl.constexpr(int(PoolState.HEAD_HOST))
TAIL_DEVICE = tl.constexpr(int(PoolState.TAIL_DEVICE))
TAIL_HOST = tl.constexpr(int(PoolState.TAIL_HOST))
HIGH_DEVICE = tl.constexpr(int(PoolState.HIGH_DEVICE))
HIGH_HOST = tl.constexpr(int(PoolState.HIGH_HOST))
DEMAND = tl.constexpr(int(PoolState.DEMAND))
MISSING = tl.constexpr(int(PoolState.MISSING))
OVERFLOWS = tl.constexpr(int(PoolState.OVERFLOWS))
SHORTAGE = tl.constexpr(int(PoolState.SHORTAGE))
FIRST_OVERFLOW = tl.constexpr(int(PoolState.FIRST_OVERFLOW))
SPILLED = tl.constexpr(int(PoolState.SPILLED))
BYTES_STASHED = tl.constexpr(int(PoolState.BYTES_STASHED))
BYTES_RESTORED = tl.constexpr(int(PoolState.BYTES_RESTORED))
PROGRAMS_DONE = tl.constexpr(int(PoolState.PROGRAMS_DONE))


def stash_pages(
    sources: Sequence[Tensor],
    rows: Sequence[Tensor],
    row_bytes: Sequence[int],
    table: Tensor,
    device_pages: Tensor,
    host_pages: Tensor,
    free_N: Tensor,
    state: Tensor,
    receipt: Tensor,
    *,
    page_bytes: int,
    number: int,
) -> None:
    """Copy the valid prefix of each source into pages, in one launch of at most 8 buffers."""
    check_count(len(sources))
    block = _block_bytes(sources, page_bytes)
    bound = sum(triton.cdiv(source.numel(), block) for source in sources)
    programs = program_count(bound, free_N.device)
    _stash[(programs,)](
        tuple(sources),
        tuple(rows),
        tuple(row_bytes),
        tuple(source.numel() // width for source, width in zip(sources, row_bytes, strict=True)),
        table,
        device_pages,
        host_pages,
        free_N,
        state,
        receipt,
        device_pages.numel() // page_bytes,
        host_pages.numel() // page_bytes,
        number,
        programs,
        BUFFERS=len(sources),
        PAGE=page_bytes,
        BLOCK=block,
        WORDS=_in_words(sources),
        num_warps=NUM_WARPS,
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
) -> None:
    """Copy the valid prefix of some buffers of a launch back, in one launch."""
    check_count(len(destinations))
    block = _block_bytes(destinations, page_bytes)
    bound = sum(triton.cdiv(destination.numel(), block) for destination in destinations)
    programs = program_count(bound, table.device)
    _restore[(programs,)](
        tuple(destinations),
        tuple(places),
        tuple(destination.numel() for destination in destinations),
        table,
        device_pages,
        host_pages,
        state,
        device_pages.numel() // page_bytes,
        programs,
        GIVEN=len(destinations),
        BUFFERS=buffers,
        PAGE=page_bytes,
        BLOCK=block,
        WORDS=_in_words(destinations),
        num_warps=NUM_WARPS,
    )


def release_pages(
    table: Tensor, free_N: Tensor, state: Tensor, *, buffers: int, device_size: int
) -> None:
    """Give the pages of a launch back; one program, so that nobody sees a tail too early."""
    host_size = free_N.numel() - device_size
    _release[(1,)](
        table, free_N, state, device_size, host_size, BUFFERS=buffers, BLOCK=1024, num_warps=4
    )


def check_count(count: int) -> None:
    """Refuse more buffers than the kernels were written for."""
    if not 1 <= count <= MOST_BUFFERS:
        raise LayoutError(
            f"one launch moves 1 to {MOST_BUFFERS} buffers, got {count}; split them into launches"
        )


def _in_words(buffers: Sequence[Tensor]) -> bool:
    """Are all addresses fit for vectors?  Pages are: a page is a power of two from 16 up."""
    return all(buffer.data_ptr() % _VECTOR == 0 for buffer in buffers)


def _block_bytes(buffers: Sequence[Tensor], page_bytes: int) -> int:
    """What a program moves at once: less where there would not be enough for every program."""
    total = sum(buffer.numel() for buffer in buffers)
    wanted = 4 * _processors(buffers[0].device) * PROGRAMS_PER_PROCESSOR
    block = MOST_BLOCK_BYTES
    while block > LEAST_BLOCK_BYTES and total // block < wanted:
        block //= 2
    return min(page_bytes, block)


def program_count(blocks: int, device: torch.device) -> int:
    """Programs for so many blocks at most: as many as run at once."""
    return max(1, min(blocks, _processors(device) * PROGRAMS_PER_PROCESSOR))


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _copy_block(p_from, p_to, left, BLOCK: tl.constexpr, WORDS: tl.constexpr):
    """Copy ``min(left, BLOCK)`` bytes."""
    if WORDS:
        p_from_word = p_from.to(tl.pointer_type(tl.int32))
        p_to_word = p_to.to(tl.pointer_type(tl.int32))
        i_word = tl.arange(0, BLOCK // 4)
        if left >= BLOCK:
            tl.store(p_to_word + i_word, tl.load(p_from_word + i_word))
        else:
            m_word = i_word < left // 4
            tl.store(p_to_word + i_word, tl.load(p_from_word + i_word, mask=m_word), mask=m_word)
            i_byte = left // 4 * 4 + tl.arange(0, 4)
            m_byte = i_byte < left
            tl.store(p_to + i_byte, tl.load(p_from + i_byte, mask=m_byte), mask=m_byte)
    else:
        i_byte = tl.arange(0, BLOCK)
        m_byte = i_byte < left
        tl.store(p_to + i_byte, tl.load(p_from + i_byte, mask=m_byte), mask=m_byte)


@triton.jit
def valid_length(p_rows, capacity_rows, row_bytes):
    """Valid bytes of a buffer: a count past the buffer must not be believed."""
    count = tl.load(p_rows).to(tl.int64)
    return tl.minimum(tl.maximum(count, 0), capacity_rows) * row_bytes


@triton.jit
def first_block(i_program, before, programs):
    """The first block of a buffer that is this program's, ``before`` blocks having gone before."""
    return (i_program - before % programs + programs) % programs


@triton.jit(do_not_specialize=["device_size", "host_size", "number", "programs"])
def _stash(
    p_sources,
    p_rows,
    row_bytes,
    capacity_rows,
    p_table,
    p_device,
    p_host,
    p_free,
    p_state,
    p_receipt,
    device_size,
    host_size,
    number,
    programs,
    BUFFERS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
):
    i_program = tl.program_id(0).to(tl.int64)
    head_device = tl.load(p_state + HEAD_DEVICE)
    head_host = tl.load(p_state + HEAD_HOST)
    free_device = tl.load(p_state + TAIL_DEVICE) - head_device
    free_host = tl.load(p_state + TAIL_HOST) - head_host
    total = tl.full((), 0, tl.int64)
    for i in tl.static_range(BUFFERS):
        total += tl.cdiv(valid_length(p_rows[i], capacity_rows[i], row_bytes[i]), PAGE)
    from_device = tl.minimum(total, free_device)
    from_host = total - from_device
    fits = from_host <= free_host

    first = tl.full((), 0, tl.int64)
    blocks_before = tl.full((), 0, tl.int64)
    bytes_stashed = tl.full((), 0, tl.int64)
    for i in tl.static_range(BUFFERS):
        length = valid_length(p_rows[i], capacity_rows[i], row_bytes[i])
        if i_program == 0:
            tl.store(p_table + HEADER + i, length)
            tl.store(p_table + HEADER + BUFFERS + i, first)
        blocks = tl.where(fits, tl.cdiv(length, BLOCK), 0)
        for i_block in range(first_block(i_program, blocks_before, programs), blocks, programs):
            o_byte = i_block * BLOCK
            slot = first + o_byte // PAGE
            o_page = i_block % (PAGE // BLOCK) * BLOCK
            if slot < from_device:
                page = tl.load(p_free + (head_device + slot) % device_size).to(tl.int64)
                p_to = p_device + page * PAGE + o_page
                _copy_block(p_sources[i] + o_byte, p_to, length - o_byte, BLOCK, WORDS)
            else:
                o_ring = (head_host + slot - from_device) % host_size
                page = tl.load(p_free + device_size + o_ring).to(tl.int64)
                p_to = p_host + (page - device_size) * PAGE + o_page
                _copy_block(p_sources[i] + o_byte, p_to, length - o_byte, BLOCK, WORDS)
            if o_page == 0:
                tl.store(p_table + HEADER + 2 * BUFFERS + slot, page)
        blocks_before += blocks
        bytes_stashed += length
        first += tl.cdiv(length, PAGE)

    sizes, heads = (device_size, host_size), (head_device, head_host)
    free = (free_device, free_host)
    commit(p_state, p_table, p_receipt, sizes, heads, free, total, bytes_stashed, number, programs)


@triton.jit
def commit(p_state, p_table, p_receipt, sizes, heads, free, total, bytes_stashed, number, programs):
    """Write the new heads and all counters, in the last program of the launch to come here."""
    # All threads of this program must have read the heads before it counts as done.
    tl.debug_barrier()
    done = tl.atomic_add(p_state + PROGRAMS_DONE, 1, sem="acq_rel")
    if done == programs - 1:
        tl.store(p_state + PROGRAMS_DONE, 0)
        from_device = tl.minimum(total, free[0])
        from_host = total - from_device
        missing = tl.load(p_state + MISSING)
        if from_host <= free[1]:
            tl.store(p_state + BYTES_STASHED, tl.load(p_state + BYTES_STASHED) + bytes_stashed)
            tl.store(p_receipt, from_device + (from_host << HOST_SHIFT))
            tl.store(p_table + 2, tl.full((), 0, tl.int64))
        else:
            _count_overflow(p_state, from_host - free[1], number)
            tl.store(p_receipt, tl.full((), RECEIPT_OVERFLOW, tl.int64))
            tl.store(p_table + 2, total)
            missing += total
            from_device = tl.full((), 0, tl.int64)
            from_host = tl.full((), 0, tl.int64)
        tl.store(p_table, from_device)
        tl.store(p_table + 1, from_host)
        tl.store(p_state + HEAD_DEVICE, heads[0] + from_device)
        tl.store(p_state + HEAD_HOST, heads[1] + from_host)
        used_device = sizes[0] - free[0] + from_device
        used_host = sizes[1] - free[1] + from_host
        tl.store(p_state + MISSING, missing)
        _raise_to(p_state + HIGH_DEVICE, used_device)
        _raise_to(p_state + HIGH_HOST, used_host)
        _raise_to(p_state + DEMAND, used_device + used_host + missing)
        tl.store(p_state + SPILLED, tl.load(p_state + SPILLED) + from_host)


@triton.jit
def _raise_to(p_counter, value):
    tl.store(p_counter, tl.maximum(tl.load(p_counter), value))


@triton.jit
def _count_overflow(p_state, shortage, number):
    tl.store(p_state + OVERFLOWS, tl.load(p_state + OVERFLOWS) + 1)
    _raise_to(p_state + SHORTAGE, shortage)
    if tl.load(p_state + FIRST_OVERFLOW) == 0:
        tl.store(p_state + FIRST_OVERFLOW, tl.full((), 1, tl.int64) + number)


@triton.jit(do_not_specialize=["device_size", "programs"])
def _restore(
    p_destinations,
    places,
    capacities,
    p_table,
    p_device,
    p_host,
    p_state,
    device_size,
    programs,
    GIVEN: tl.constexpr,
    BUFFERS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
):
    i_program = tl.program_id(0).to(tl.int64)
    missing = tl.load(p_table + 2)
    blocks_before = tl.full((), 0, tl.int64)
    bytes_restored = tl.full((), 0, tl.int64)
    for i in tl.static_range(GIVEN):
        length = tl.minimum(tl.load(p_table + HEADER + places[i]), capacities[i])
        first = tl.load(p_table + HEADER + BUFFERS + places[i])
        blocks = tl.cdiv(length, BLOCK)
        for i_block in range(first_block(i_program, blocks_before, programs), blocks, programs):
            o_byte = i_block * BLOCK
            p_to = p_destinations[i] + o_byte
            left = length - o_byte
            if missing > 0:
                i_byte = tl.arange(0, BLOCK)
                tl.store(p_to + i_byte, tl.zeros((BLOCK,), tl.uint8), mask=i_byte < left)
            else:
                page = tl.load(p_table + HEADER + 2 * BUFFERS + first + o_byte // PAGE)
                o_page = i_block % (PAGE // BLOCK) * BLOCK
                if page < device_size:
                    _copy_block(p_device + page * PAGE + o_page, p_to, left, BLOCK, WORDS)
                else:
                    p_from = p_host + (page - device_size) * PAGE + o_page
                    _copy_block(p_from, p_to, left, BLOCK, WORDS)
        blocks_before += blocks
        bytes_restored += length
    if (i_program == 0) & (missing == 0):
        tl.atomic_add(p_state + BYTES_RESTORED, bytes_restored)


@triton.jit(do_not_specialize=["device_size", "host_size"])
def _release(
    p_table, p_free, p_state, device_size, host_size, BUFFERS: tl.constexpr, BLOCK: tl.constexpr
):
    from_device = tl.load(p_table)
    from_host = tl.load(p_table + 1)
    tail_device = tl.load(p_state + TAIL_DEVICE)
    tail_host = tl.load(p_state + TAIL_HOST)
    p_pages = p_table + HEADER + 2 * BUFFERS
    for o_slot in range(0, from_device, BLOCK):
        i_slot = o_slot + tl.arange(0, BLOCK)
        m_slot = i_slot < from_device
        page = tl.load(p_pages + i_slot, mask=m_slot)
        tl.store(p_free + (tail_device + i_slot) % device_size, page.to(tl.int32), mask=m_slot)
    for o_slot in range(0, from_host, BLOCK):
        i_slot = o_slot + tl.arange(0, BLOCK)
        m_slot = i_slot < from_host
        page = tl.load(p_pages + from_device + i_slot, mask=m_slot)
        o_ring = (tail_host + i_slot) % host_size
        tl.store(p_free + device_size + o_ring, page.to(tl.int32), mask=m_slot)
    # The counters move once every thread has read them and its pages are in the ring.
    tl.debug_barrier()
    tl.store(p_state + TAIL_DEVICE, tail_device + from_device)
    tl.store(p_state + TAIL_HOST, tail_host + from_host)
    tl.store(p_state + MISSING, tl.load(p_state + MISSING) - tl.load(p_table + 2))
