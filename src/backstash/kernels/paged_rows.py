"""Where rows in pages are, for the kernels that read them there.

A value's place in its buffer says in which page it lies and where in it; the launch's table says
where the page is.  Rows are looked up a chunk of neighbours at a time, so a chunk must be in one
page as a whole: it is, if its bytes divide those of a row and of a page.  What the pages of the
host add to an address counted from the pool on the device is one number, so a value has one
address whichever tier it lies in.
"""

# The type checker knows neither launch options nor loops that Triton unrolls.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.reference.paged_rows import PagedRows
from backstash.kernels.reference.pages import TABLE_HEADER

MISSING = tl.constexpr(2)


class Lookup(NamedTuple):
    """A buffer in pages as a kernel takes it.

    Attributes:
        pages: The pages on the device in the buffer's dtype, the launch's table, and three places
            in the table: of the buffer's valid bytes, of the number of its first slot, and of
            the first slot of all.
        host: How many pages the device has, and where the first page of the host would be if
            page numbers went on, in values from the first page; None if there are no others.
    """

    pages: tuple[Tensor, Tensor, int, int, int]
    host: tuple[int, int] | None


def lookup_of(paged: PagedRows) -> Lookup:
    """How a kernel finds the values of a buffer."""
    entry = TABLE_HEADER + paged.place
    pages = (
        paged.device_pages.view(paged.dtype),
        paged.table,
        entry,
        entry + paged.buffers,
        TABLE_HEADER + 2 * paged.buffers,
    )
    if not paged.host_pages.numel():
        return Lookup(pages, None)
    gap = paged.host_pages.data_ptr() - paged.device_pages.data_ptr() - paged.device_pages.numel()
    size = paged.device_pages.numel() // paged.page_bytes
    return Lookup(pages, (size, gap // paged.dtype.itemsize))


def is_in_chunks(paged: PagedRows, columns: int) -> bool:
    """Do chunks of so many columns cut up both the rows and the pages?"""
    chunk = columns * paged.dtype.itemsize
    return paged.row_bytes % chunk == 0 and paged.page_bytes % chunk == 0


@triton.jit
def valid_rows(pages, row_values):
    """How many rows are valid, and how many of those are in pages: all or none."""
    p_values, p_table, entry, _, _ = pages
    row_bytes = row_values * (p_values.dtype.element_ty.primitive_bitwidth // 8)
    rows = tl.load(p_table + entry) // row_bytes
    return rows, tl.where(tl.load(p_table + MISSING) == 0, rows, 0)


@triton.jit
def find_values(pages, host, o_value, mask, PAGE: tl.constexpr):
    """Where values of the buffer are; a page holds ``PAGE``."""
    p_values, p_table, _, first, slots = pages
    p_slots = p_table + slots + tl.load(p_table + first)
    page = tl.load(p_slots + o_value // PAGE, mask=mask, other=0)
    o_page = page * PAGE
    if host is not None:
        o_page += tl.where(page < host[0], 0, host[1])
    return p_values + (o_page + o_value % PAGE)
