"""Buffers into pages of a shared pool, and back.

Many buffers share one pool.  Its pages lie in two tiers, first those of the device, then
those of the host, and are numbered through.  Of each buffer only the valid prefix is copied,
and how long that is only the device knows; so the free pages, the counts and the flags live
there too, and nothing here is told to the host, but for one number (the *receipt*) that is
written into host memory and may be read when it has arrived.

A buffer of bytes is copied as it is.  One of floating-point values is quantized on its way, as
:mod:`backstash.kernels.reference.mx_pages` says; a launch may take both kinds.

The pool is four tensors: the bytes of both tiers, ``free_N`` and ``state``.  ``free_N`` holds
the numbers of the free pages, a ring for each tier.  A ring's head and tail only ever grow:
what lies between them is free, and a number's place is the counter modulo the ring's size.

A launch takes pages for all of its buffers or for none: if both tiers together have too few,
it counts an overflow, and its buffers come back as zeros, never as what happens to be there.

The *table* of a launch says where its bytes went::

    [pages on the device, pages on the host, pages missing, numbers a restore has given,
     valid bytes of each buffer ..., first slot of each buffer ..., page of each slot ...]

Letters: B buffers of a launch, N pages of both tiers.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from torch import Tensor

from backstash.kernels.reference.moves import MOVES_HEADER, Moves
from backstash.kernels.reference.mx_pages import mx_page_values, mx_pages_of, mx_values_of


class PoolState(enum.IntEnum):
    """The places of the counters in ``state``, int64; the highest are since they were cleared."""

    HEAD_DEVICE = 0
    HEAD_HOST = 1
    TAIL_DEVICE = 2
    TAIL_HOST = 3
    #: Most pages ever in use at once in each tier.
    HIGH_DEVICE = 4
    HIGH_HOST = 5
    #: Most pages that would have been in use at once if there had been room for all.
    DEMAND = 6
    #: Pages that stashes without room would hold now.
    MISSING = 7
    OVERFLOWS = 8
    #: Most pages that one launch lacked.
    SHORTAGE = 9
    #: Number of the first launch without room, plus one.
    FIRST_OVERFLOW = 10
    SPILLED = 11
    BYTES_STASHED = 12
    BYTES_RESTORED = 13
    #: Numbers that the programs of the running launch have asked for; zero between launches.
    #: Those of a restore are counted in its table.
    NUMBERS_GIVEN = 14


#: Buffers that one launch takes at most.
MOST_BUFFERS = 8
#: Launches whose pages are given back by one.
MOST_RELEASED = 8
TABLE_HEADER = 4
RECEIPT_PENDING = -1
RECEIPT_OVERFLOW = -2
RECEIPT_HOST_SHIFT = 32


def new_pool_state(device_pages: int, host_pages: int, device: torch.device) -> tuple[Tensor, ...]:
    """``free_N`` int32 with every page free, and ``state`` int64."""
    free_N = torch.arange(device_pages + host_pages, dtype=torch.int32, device=device)
    state = torch.zeros(len(PoolState), dtype=torch.int64, device=device)
    state[PoolState.TAIL_DEVICE] = device_pages
    state[PoolState.TAIL_HOST] = host_pages
    return free_N, state


def table_length(buffers: int, slots: int) -> int:
    """Entries of the table of a launch of ``buffers`` that fill at most ``slots`` pages."""
    return TABLE_HEADER + 2 * buffers + slots


def page_payload(dtype: torch.dtype, page_bytes: int) -> int:
    """How many elements of a buffer of ``dtype`` a page holds: bytes, or values in MXFP8."""
    return page_bytes if dtype is torch.uint8 else mx_page_values(page_bytes)


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
    """Put the valid prefix of each source into pages, and write down where.

    Args:
        sources: B buffers of one dimension: uint8, which is copied as it is, or
            floating-point values, which are quantized.
        rows: Valid rows of each, an integer of one element on the device; clamped to the buffer.
        widths: Elements of a row of each.
        table: int64, written.
        device_pages, host_pages: The bytes of each tier, uint8.
        receipt: int64 ``(1,)`` in host memory; gets the pages taken from the device and, above
            ``RECEIPT_HOST_SHIFT`` bits, those of the host, or ``RECEIPT_OVERFLOW``.
        page_bytes: A power of two.
        number: What an overflow is reported as.
        moves: Written; a GPU may leave whole pages of large buffers to it.
        programs: At most so many of 16 warps make the copies of a GPU; None for the fastest.
    """
    valid = [
        source[: min(max(int(count), 0), source.numel() // width) * width]
        for source, count, width in zip(sources, rows, widths, strict=True)
    ]
    lengths = [values.nbytes for values in valid]
    needs = [-(-values.numel() // page_payload(values.dtype, page_bytes)) for values in valid]
    pages = (device_pages.numel() // page_bytes, host_pages.numel() // page_bytes)
    taken = take_pages(lengths, needs, table, pages, free_N, state, receipt, number)
    for values, ids in zip(valid, taken, strict=False):
        content = values if values.dtype is torch.uint8 else mx_pages_of(values, page_bytes)
        write_pages(content, ids, device_pages, host_pages, page_bytes)
    _leave_nothing(moves)


def take_pages(
    lengths: Sequence[int],
    needs: Sequence[int],
    table: Tensor,
    pages: tuple[int, int],
    free_N: Tensor,
    state: Tensor,
    receipt: Tensor,
    number: int,
) -> Sequence[Tensor]:
    """Take as many pages as are needed off the free list, or none, and write it all down.

    Args:
        lengths: Valid bytes of each buffer.
        needs: Pages for each.
        pages: How many there are in each tier.

    Returns:
        The pages of each buffer; nothing if there are too few.
    """
    total = sum(needs)
    device_size, host_size = pages
    counters: list[int] = state.tolist()
    heads = counters[PoolState.HEAD_DEVICE], counters[PoolState.HEAD_HOST]
    free_device = counters[PoolState.TAIL_DEVICE] - heads[0]
    free_host = counters[PoolState.TAIL_HOST] - heads[1]
    from_device = min(total, free_device)
    from_host = total - from_device
    shortage = max(from_host - free_host, 0)
    if shortage:
        from_device = from_host = 0
    firsts = [sum(needs[:i]) for i in range(len(needs))]
    missing = total if shortage else 0
    head = [from_device, from_host, missing, 0, *lengths, *firsts]
    table[: len(head)] = torch.tensor(head, dtype=torch.int64, device=table.device)
    device_ids = _ring(free_N[:device_size], heads[0], from_device)
    host_ids = _ring(free_N[device_size:], heads[1], from_host)
    ids = torch.cat([device_ids, host_ids]).long()
    table[len(head) : len(head) + len(ids)] = ids
    state[PoolState.HEAD_DEVICE] += from_device
    state[PoolState.HEAD_HOST] += from_host
    in_use = device_size - free_device + from_device, host_size - free_host + from_host
    _raise_to(state, PoolState.HIGH_DEVICE, in_use[0])
    _raise_to(state, PoolState.HIGH_HOST, in_use[1])
    state[PoolState.MISSING] += missing
    _raise_to(state, PoolState.DEMAND, sum(in_use) + int(state[PoolState.MISSING]))
    state[PoolState.SPILLED] += from_host
    if not shortage:
        state[PoolState.BYTES_STASHED] += sum(lengths)
        receipt.fill_(from_device + (from_host << RECEIPT_HOST_SHIFT))
        return ids.split(list(needs))
    state[PoolState.OVERFLOWS] += 1
    _raise_to(state, PoolState.SHORTAGE, shortage)
    if counters[PoolState.FIRST_OVERFLOW] == 0:
        state[PoolState.FIRST_OVERFLOW] = number + 1
    receipt.fill_(RECEIPT_OVERFLOW)
    return []


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
    """Bring the valid prefix of some buffers of a launch back; the pages keep it.

    What lies past the valid prefix is left as it is.  After an overflow the prefix is zeros.

    Args:
        destinations: Buffers like their sources.
        places: Which buffer of the launch each of them is.
        buffers: B, how many buffers the launch had.
        moves: Written; a GPU may leave whole pages of large buffers to it.
        programs: At most so many of 16 warps make the copies of a GPU; None for the fastest.
    """
    _leave_nothing(moves)
    entries: list[int] = table[: TABLE_HEADER + 2 * buffers].tolist()
    for destination, place in zip(destinations, places, strict=True):
        length = entries[TABLE_HEADER + place] // destination.itemsize
        valid = destination[: min(length, destination.numel())]
        if entries[2]:
            valid.zero_()
            continue
        first = TABLE_HEADER + 2 * buffers + entries[TABLE_HEADER + buffers + place]
        ids = table[first : first - (-valid.numel() // page_payload(valid.dtype, page_bytes))]
        if valid.dtype is torch.uint8:
            read_pages(valid, ids, device_pages, host_pages, page_bytes)
        else:
            content = torch.empty(
                len(ids) * page_bytes, dtype=torch.uint8, device=device_pages.device
            )
            read_pages(content, ids, device_pages, host_pages, page_bytes)
            valid.copy_(mx_values_of(content, valid.dtype, page_bytes)[: valid.numel()])
        state[PoolState.BYTES_RESTORED] += valid.nbytes


def release_pages(
    tables: Sequence[Tensor],
    free_N: Tensor,
    state: Tensor,
    *,
    buffers: Sequence[int],
    device_size: int,
) -> None:
    """Give the pages of some launches back, those of the first one first.

    Args:
        tables: At most ``MOST_RELEASED``.
        buffers: How many buffers each launch had.
        device_size: Pages of that tier.
    """
    for table, count in zip(tables, buffers, strict=True):
        from_device, from_host, missing = table[:3].tolist()
        ids = table[TABLE_HEADER + 2 * count :].int()
        tails: list[int] = state.tolist()
        for ring, tail, pages in (
            (free_N[:device_size], tails[PoolState.TAIL_DEVICE], ids[:from_device]),
            (free_N[device_size:], tails[PoolState.TAIL_HOST], ids[from_device:][:from_host]),
        ):
            if len(pages):
                ring[(torch.arange(len(pages), device=ring.device) + tail) % len(ring)] = pages
        state[PoolState.TAIL_DEVICE] += from_device
        state[PoolState.TAIL_HOST] += from_host
        state[PoolState.MISSING] -= missing


def _leave_nothing(moves: Moves | None) -> None:
    if moves is not None:
        moves.list_N[:MOVES_HEADER] = 0


def _ring(ring: Tensor, head: int, count: int) -> Tensor:
    return ring[(torch.arange(count, device=ring.device) + head) % len(ring)] if count else ring[:0]


def _raise_to(state: Tensor, place: PoolState, value: int) -> None:
    state[place] = max(int(state[place]), value)


def write_pages(
    source: Tensor, ids: Tensor, device_pages: Tensor, host_pages: Tensor, page_bytes: int
) -> None:
    """Copy bytes into pages; the last one need not become full."""
    device_size = device_pages.numel() // page_bytes
    whole = len(source) // page_bytes
    pages = source[: whole * page_bytes].view(whole, page_bytes)
    # A launch fills the device first, so its pages on the host are the last ones.
    on_device = int((ids < device_size).sum())
    split = min(on_device, whole)
    device_pages.view(-1, page_bytes)[ids[:split]] = pages[:split]
    host_pages.view(-1, page_bytes)[ids[split:whole] - device_size] = pages[split:]
    if whole < len(ids):
        rest = source[whole * page_bytes :]
        _page(int(ids[whole]), device_pages, host_pages, page_bytes)[: len(rest)] = rest


def read_pages(
    destination: Tensor, ids: Tensor, device_pages: Tensor, host_pages: Tensor, page_bytes: int
) -> None:
    """Copy bytes out of pages."""
    device_size = device_pages.numel() // page_bytes
    whole = len(destination) // page_bytes
    pages = destination[: whole * page_bytes].view(whole, page_bytes)
    split = min(int((ids < device_size).sum()), whole)
    pages[:split] = device_pages.view(-1, page_bytes)[ids[:split]]
    pages[split:] = host_pages.view(-1, page_bytes)[ids[split:whole] - device_size]
    if whole < len(ids):
        rest = destination[whole * page_bytes :]
        rest.copy_(_page(int(ids[whole]), device_pages, host_pages, page_bytes)[: len(rest)])


def _page(number: int, device_pages: Tensor, host_pages: Tensor, page_bytes: int) -> Tensor:
    first = number * page_bytes
    if first < device_pages.numel():
        return device_pages[first : first + page_bytes]
    first -= device_pages.numel()
    return host_pages[first : first + page_bytes]
