"""Values into pages as MXFP8, and back: half the bytes of bfloat16, and lossy.

Each page stands alone: first the codes of its values, then an exponent for every block of 32.
A block is 32 neighbours of the flat buffer, and codes and exponents are those of
:func:`~backstash.kernels.reference.cast.quantize_mx_rows`.  Which pages are taken, and what the
table and the counters say, is as in :mod:`backstash.kernels.reference.pages`; lengths count the
bytes of the values, not of the codes.

Letters: N blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backstash.kernels.reference.cast import MX_BLOCK, dequantize_mx_rows, quantize_mx_rows
from backstash.kernels.reference.pages import (
    TABLE_HEADER,
    PoolState,
    read_pages,
    take_pages,
    write_pages,
)

#: A program of the fast twin takes at most so many blocks at once, so a page holds a multiple.
MOST_BLOCKS_AT_ONCE = 64


def mx_page_blocks(page_bytes: int) -> tuple[int, int]:
    """How many blocks a page holds, and how many of them a program takes at once."""
    fitting = page_bytes // (MX_BLOCK + 1)
    at_once = min(MOST_BLOCKS_AT_ONCE, 1 << max(fitting.bit_length() - 1, 0))
    return fitting // at_once * at_once, at_once


def mx_page_values(page_bytes: int) -> int:
    """How many values a page holds; none if it is smaller than a block and its exponent."""
    return mx_page_blocks(page_bytes)[0] * MX_BLOCK


def stash_mx_pages(
    sources: Sequence[Tensor],
    rows: Sequence[Tensor],
    row_values: Sequence[int],
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
    """Quantize the valid prefix of each source into pages.

    Args:
        sources: Buffers of floating-point values, of one dimension.
        rows: Valid rows of each; clamped to the buffer.
        row_values: Values of a row of each.

    The other arguments are those of :func:`~backstash.kernels.reference.pages.stash_pages`.
    """
    per_page = mx_page_values(page_bytes)
    blocks = per_page // MX_BLOCK
    counts = [
        min(max(int(count), 0), source.numel() // width) * width
        for source, count, width in zip(sources, rows, row_values, strict=True)
    ]
    lengths = [n * source.itemsize for n, source in zip(counts, sources, strict=True)]
    needs = [-(-count // per_page) for count in counts]
    pages = (device_pages.numel() // page_bytes, host_pages.numel() // page_bytes)
    taken = take_pages(lengths, needs, table, pages, free_N, state, receipt, number)
    for source, count, ids in zip(sources, counts, taken, strict=False):
        values = source.new_zeros(len(ids) * per_page)
        values[:count] = source[:count]
        codes, exponents = quantize_mx_rows(values.view(-1, MX_BLOCK))
        content = codes.new_zeros(len(ids), page_bytes)
        content[:, :per_page] = codes.view(len(ids), per_page)
        content[:, per_page : per_page + blocks] = exponents.view(len(ids), blocks)
        write_pages(content.view(-1), ids, device_pages, host_pages, page_bytes)


def restore_mx_pages(
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
    """Write the values of the valid prefix of some buffers, rounded once to their dtype.

    The arguments are those of :func:`~backstash.kernels.reference.pages.restore_pages`.
    """
    per_page = mx_page_values(page_bytes)
    blocks = per_page // MX_BLOCK
    entries: list[int] = table[: TABLE_HEADER + 2 * buffers].tolist()
    for destination, place in zip(destinations, places, strict=True):
        count = min(entries[TABLE_HEADER + place] // destination.itemsize, destination.numel())
        if entries[2]:
            destination[:count] = 0
            continue
        first = TABLE_HEADER + 2 * buffers + entries[TABLE_HEADER + buffers + place]
        ids = table[first : first + -(-count // per_page)]
        content = torch.empty(len(ids) * page_bytes, dtype=torch.uint8)
        read_pages(content, ids, device_pages, host_pages, page_bytes)
        content = content.view(len(ids), page_bytes)
        codes = content[:, :per_page].reshape(-1, MX_BLOCK)
        exponents = content[:, per_page : per_page + blocks].reshape(-1, 1)
        values = dequantize_mx_rows(codes, exponents, destination.dtype)
        destination[:count] = values.view(-1)[:count]
        state[PoolState.BYTES_RESTORED] += count * destination.itemsize
