"""The free list of a pool, inside kernels: taking pages, finding them, giving them back.

A launch reads the heads of both rings once, counts on from there, and its last program writes
the new ones.  What the counters mean is in :mod:`backstash.kernels.reference.pages`.
"""

# The type checker knows neither launch options nor loops that Triton unrolls.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

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
PROGRAMS_DONE = tl.constexpr(int(PoolState.PROGRAMS_DONE))


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
def commit(p_state, p_table, p_receipt, sizes, total, bytes_stashed, number, programs):
    """Write the new heads and all counters, in the last program of the launch to come here."""
    # All threads of this program must have read the heads before it counts as done.
    tl.debug_barrier()
    done = tl.atomic_add(p_state + PROGRAMS_DONE, 1, sem="acq_rel")
    if done == programs - 1:
        tl.store(p_state + PROGRAMS_DONE, 0)
        # Read again, so that no program keeps them in registers while it copies.
        head_device, head_host, free_device, free_host = read_pool(p_state)
        from_device = tl.minimum(total, free_device)
        from_host = total - from_device
        missing = tl.load(p_state + MISSING)
        if from_host <= free_host:
            tl.store(p_state + BYTES_STASHED, tl.load(p_state + BYTES_STASHED) + bytes_stashed)
            tl.store(p_receipt, from_device + (from_host << HOST_SHIFT))
            tl.store(p_table + 2, tl.full((), 0, tl.int64))
        else:
            _count_overflow(p_state, from_host - free_host, number)
            tl.store(p_receipt, tl.full((), RECEIPT_OVERFLOW, tl.int64))
            tl.store(p_table + 2, total)
            missing += total
            from_device = tl.full((), 0, tl.int64)
            from_host = tl.full((), 0, tl.int64)
        tl.store(p_table, from_device)
        tl.store(p_table + 1, from_host)
        tl.store(p_state + HEAD_DEVICE, head_device + from_device)
        tl.store(p_state + HEAD_HOST, head_host + from_host)
        used_device = sizes[0] - free_device + from_device
        used_host = sizes[1] - free_host + from_host
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


@triton.jit(do_not_specialize=["device_size", "host_size"])
def release(
    p_table, p_free, p_state, device_size, host_size, BUFFERS: tl.constexpr, BLOCK: tl.constexpr
):
    """Give the pages of a table back behind both tails."""
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
