"""The free list of a pool, inside kernels: taking pages, finding them, giving them back.

A launch reads the heads of both rings once and counts on from there; the new ones are written when
every program has read the old.  What the counters mean is in
:mod:`backstash.kernels.reference.pages`.
"""

# The type checker knows neither launch options nor loops that Triton unrolls.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Iterable

import triton
import triton.language as tl

from backstash.kernels.reference import pages as reference
from backstash.kernels.reference.pages import PoolState

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
NUMBERS_GIVEN = tl.constexpr(int(PoolState.NUMBERS_GIVEN))
#: Where a table counts the same for its restore.
RESTORING = tl.constexpr(3)

_NEVER_SPECIAL = 2**40 + 8
NEVER_SPECIAL = tl.constexpr(_NEVER_SPECIAL)


def written(numbers: Iterable[int]) -> tuple[int, ...]:
    """Numbers so that a kernel is not compiled anew for others; it reads them with ``read_number``.

    Of a tuple's elements Triton compiles in which are 1, which are multiples of 16 and which fit
    into 32 bits.  Written like this, none is any of these.
    """
    return tuple([_NEVER_SPECIAL + 32 * number for number in numbers])


@triton.jit
def read_number(number):
    """A number that :func:`written` wrote."""
    return (number - NEVER_SPECIAL) // 32


@triton.jit
def read_pool(p_state):
    """The heads of both rings, and how many pages are free in each."""
    head_device = tl.load(p_state + HEAD_DEVICE)
    head_host = tl.load(p_state + HEAD_HOST)
    free_device = tl.load(p_state + TAIL_DEVICE) - head_device
    return head_device, head_host, free_device, tl.load(p_state + TAIL_HOST) - head_host


@triton.jit
def ring_places(head_device, head_host, sizes):
    """Where the counters stand in the rings."""
    place_device = head_device % tl.maximum(sizes[0], 1)
    return place_device.to(tl.int32), (head_host % tl.maximum(sizes[1], 1)).to(tl.int32)


@triton.jit
def page_at(p_free, slot, from_device, rings, sizes):
    """The free page that a launch's slot takes."""
    i_device = rings[0] + slot
    i_device -= tl.where(i_device >= sizes[0], sizes[0], 0)
    i_host = rings[1] + slot - from_device
    i_host -= tl.where(i_host >= sizes[1], sizes[1], 0)
    i_free = tl.where(slot < from_device, i_device, sizes[0] + i_host)
    return tl.load(p_free + i_free).to(tl.int64)


@triton.jit
def page_address(p_device, p_host, page, device_size, PAGE: tl.constexpr):
    """Where a page begins, in whichever tier it lies."""
    on_host = p_host + (page - device_size) * PAGE
    return tl.where(page < device_size, p_device + page * PAGE, on_host)


@triton.jit
def find_page(lookup, slot, PAGE: tl.constexpr):
    """The free page that a launch's slot takes, and where it begins."""
    p_free, from_device, rings, sizes, p_device, p_host = lookup
    page = page_at(p_free, slot, from_device, rings, sizes)
    return page, page_address(p_device, p_host, page, sizes[0], PAGE)


@triton.jit
def next_part(taken, p_given, ASK: tl.constexpr):
    """The part that a program takes after ``taken``; its first is the one with its own number.

    With ``ASK`` a program that was fast gets more parts, and all stay close together.
    """
    if ASK:
        # Nothing is handed over with it, so it need not wait until what was written has arrived.
        return tl.num_programs(0) + tl.atomic_add(p_given, 1, sem="relaxed").to(tl.int32)
    else:
        return taken + tl.num_programs(0)


@triton.jit
def is_last(taken, parts, p_given, ASK: tl.constexpr):
    """Is this the program that has asked for a number last, so that all have read the heads?

    Every program asks once at least, and not before it has read them: what it has taken says so.
    """
    programs = tl.num_programs(0)
    if ASK:
        if tl.program_id(0) >= parts:
            taken = next_part(taken, p_given, ASK)
        return taken == programs + tl.maximum(parts, programs) - 1
    else:
        # All threads of this program must have read them before it counts.
        tl.debug_barrier()
        return tl.atomic_add(p_given, 1, sem="relaxed") == programs - 1


@triton.jit
def commit(p_state, p_table, p_receipt, sizes, total, bytes_stashed, number):
    """Write the new heads and all counters, when every program has read the old ones."""
    # All are read before one is written: a reading behind a writing would wait for it to return.
    head_device, head_host, free_device, free_host = read_pool(p_state)
    stashed = tl.load(p_state + BYTES_STASHED)
    spilled = tl.load(p_state + SPILLED)
    missing = tl.load(p_state + MISSING)
    high_device = tl.load(p_state + HIGH_DEVICE)
    high_host = tl.load(p_state + HIGH_HOST)
    demand = tl.load(p_state + DEMAND)
    from_device = tl.minimum(total, free_device)
    from_host = total - from_device
    lacking = tl.full((), 0, tl.int64)
    receipt = from_device + (from_host << HOST_SHIFT)
    if from_host > free_host:
        _count_overflow(p_state, from_host - free_host, number)
        receipt = tl.full((), RECEIPT_OVERFLOW, tl.int64)
        lacking += total
        from_device = tl.full((), 0, tl.int64)
        from_host = tl.full((), 0, tl.int64)
        bytes_stashed = tl.full((), 0, tl.int64)
    tl.store(p_receipt, receipt)
    tl.store(p_table, from_device)
    tl.store(p_table + 1, from_host)
    tl.store(p_table + 2, lacking)
    tl.store(p_table + RESTORING, 0)
    tl.store(p_state + HEAD_DEVICE, head_device + from_device)
    tl.store(p_state + HEAD_HOST, head_host + from_host)
    used_device = sizes[0] - free_device + from_device
    used_host = sizes[1] - free_host + from_host
    missing += lacking
    tl.store(p_state + MISSING, missing)
    tl.store(p_state + HIGH_DEVICE, tl.maximum(high_device, used_device))
    tl.store(p_state + HIGH_HOST, tl.maximum(high_host, used_host))
    tl.store(p_state + DEMAND, tl.maximum(demand, used_device + used_host + missing))
    tl.store(p_state + BYTES_STASHED, stashed + bytes_stashed)
    tl.store(p_state + SPILLED, spilled + from_host)
    tl.store(p_state + NUMBERS_GIVEN, 0)


@triton.jit
def _count_overflow(p_state, shortage, number):
    tl.store(p_state + OVERFLOWS, tl.load(p_state + OVERFLOWS) + 1)
    tl.store(p_state + SHORTAGE, tl.maximum(tl.load(p_state + SHORTAGE), shortage))
    if tl.load(p_state + FIRST_OVERFLOW) == 0:
        tl.store(p_state + FIRST_OVERFLOW, tl.full((), 1, tl.int64) + number)


@triton.jit(do_not_specialize=["device_size", "host_size"])
def release(
    p_tables, buffers, p_free, p_state, device_size, host_size,
    TABLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Give the pages of some tables back behind both tails; one of no buffers has none."""
    tail_device = tl.load(p_state + TAIL_DEVICE)
    tail_host = tl.load(p_state + TAIL_HOST)
    missing = tl.load(p_state + MISSING)
    for i in tl.static_range(TABLES):
        count = read_number(buffers[i])
        if count > 0:
            from_device = tl.load(p_tables[i])
            from_host = tl.load(p_tables[i] + 1)
            missing -= tl.load(p_tables[i] + 2)
            p_pages = p_tables[i] + HEADER + 2 * count
            for o_slot in range(0, from_device, BLOCK):
                i_slot = o_slot + tl.arange(0, BLOCK)
                m_slot = i_slot < from_device
                page = tl.load(p_pages + i_slot, mask=m_slot).to(tl.int32)
                tl.store(p_free + (tail_device + i_slot) % device_size, page, mask=m_slot)
            for o_slot in range(0, from_host, BLOCK):
                i_slot = o_slot + tl.arange(0, BLOCK)
                m_slot = i_slot < from_host
                page = tl.load(p_pages + from_device + i_slot, mask=m_slot).to(tl.int32)
                o_ring = device_size + (tail_host + i_slot) % host_size
                tl.store(p_free + o_ring, page, mask=m_slot)
            tail_device += from_device
            tail_host += from_host
    # The counters move once every thread has read them and its pages are in the ring.
    tl.debug_barrier()
    tl.store(p_state + TAIL_DEVICE, tail_device)
    tl.store(p_state + TAIL_HOST, tail_host)
    tl.store(p_state + MISSING, missing)
