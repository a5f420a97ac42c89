"""A matrix whose valid rows lie in pages, and the operations that read it there.

A matrix that was stashed is a run of bytes, cut into pages that lie anywhere.  Copied back it would
be written once and read once.  An operation that can look up where a page is reads the same values
without that copy; every number of its result is the one that the copy would give.

Rows past the valid ones are in no page, and of a launch that found no room no row is.  The
first are never read; the others are zeros, as a copy back would leave them.

Letters: T rows there is room for, N and K columns of the two operands of a weight gradient,
G groups.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from backstash.kernels.reference.grouped_mm import grouped_mm_dw
from backstash.kernels.reference.pages import TABLE_HEADER, read_pages
from backstash.kernels.reference.slabs import Slabs, slab_values


class PagedRows(NamedTuple):
    """One buffer of a launch, as the matrix or the row of numbers that was stashed.

    ``device_pages``, ``host_pages`` and ``table`` are what :func:`stash_pages` was given, the
    buffer is the one at ``place`` of its ``buffers``.  While somebody has the ``holder`` its pages
    are not given back: whoever reads drops it behind the last launch that does.
    """

    device_pages: Tensor
    host_pages: Tensor
    table: Tensor
    place: int
    buffers: int
    page_bytes: int
    dtype: torch.dtype
    shape: torch.Size
    holder: object = None

    @property
    def device(self) -> torch.device:
        """Where operations read it."""
        return self.device_pages.device

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.shape[1:].numel() * self.dtype.itemsize


#: A matrix that operations read in its pages: copied there, or computed there.
InPages = PagedRows | Slabs


def page_values(paged: InPages) -> Tensor:
    """The matrix in memory of its own; rows that are in no page are zeros."""
    if isinstance(paged, Slabs):
        return slab_values(paged)
    values = torch.zeros(paged.shape, dtype=paged.dtype, device=paged.device)
    entries: list[int] = paged.table[: TABLE_HEADER + 2 * paged.buffers].tolist()
    if entries[2]:
        return values
    content = values.view(-1).view(torch.uint8)
    content = content[: entries[TABLE_HEADER + paged.place]]
    first = TABLE_HEADER + 2 * paged.buffers + entries[TABLE_HEADER + paged.buffers + paged.place]
    ids = paged.table[first : first - (-len(content) // paged.page_bytes)]
    read_pages(content, ids, paged.device_pages, paged.host_pages, paged.page_bytes)
    return values


def multiplies_pages(paged: InPages) -> bool:
    """Does :func:`grouped_mm_dw_of_pages` read this matrix where it is?"""
    return len(paged.shape) == 2


def grouped_mm_dw_of_pages(dy_TN: Tensor, x: InPages, ends_G: Tensor) -> Tensor:
    """Give :func:`grouped_mm_dw` of a matrix that :func:`multiplies_pages` says yes to.

    Raises:
        ShapeError, DtypeError: as :func:`grouped_mm_dw` does.
    """
    return grouped_mm_dw(dy_TN, page_values(x), ends_G)
