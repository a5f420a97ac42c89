"""Rows of groups in slabs: pages that kernels write and read as they compute.

A *slab* is 64 rows of one group by as many columns as fill a page; a row is whole slabs wide, and
each group begins with a slab of its own.  So the copy engine moves a block of a product's rows from
its page, or into it, as it would move it anywhere, and what is saved for backward need not be
copied into pages: it is computed there.

Slabs are claimed once it is known how many rows each group has, before anything is computed.
The rows that a group's last slab has to spare are zeros.  A launch without room claims none: what
is written there is lost, and what is read are zeros.

Letters: T rows there is room for, H columns of tokens, N and K columns of the two operands of a
weight gradient, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from backstash.errors import ShapeError
from backstash.kernels.reference.grouped_mm import grouped_mm
from backstash.kernels.reference.pages import TABLE_HEADER, take_pages
from backstash.kernels.reference.permute import permute

SLAB_ROWS = 64


class Slabs(NamedTuple):
    """A matrix ``(T, columns)`` whose rows are in slabs.

    ``device_pages`` and ``table`` are what :func:`claim_slabs` was given.  The page of a slab is
    ``table[first + pitch * high + wide]``, where ``high`` and ``wide`` say which slab it is from
    above and from the left.  ``shift_G`` says how many rows each group begins later than it would
    if none were spare.  While somebody has the ``holder`` the pages are not given back.
    """

    device_pages: Tensor
    table: Tensor
    ends_G: Tensor
    shift_G: Tensor
    first: int
    pitch: int
    page_bytes: int
    dtype: torch.dtype
    shape: torch.Size
    holder: object = None

    @property
    def device(self) -> torch.device:
        """Where operations read and write it."""
        return self.device_pages.device

    def pages(self) -> Tensor:
        """All pages of the pool, one under the other, as slabs of this dtype."""
        columns = slab_width(self.dtype, self.page_bytes)
        return self.device_pages.view(self.dtype).view(-1, columns)


def slab_width(dtype: torch.dtype, page_bytes: int) -> int:
    """How many columns wide a slab is."""
    return page_bytes // (SLAB_ROWS * dtype.itemsize)


def slabs_for(rows: int, groups: int) -> int:
    """How many slabs high a matrix is at most: a group's first row takes one, then each 64."""
    first = min(groups, rows)
    return first + (rows - first) // SLAB_ROWS if groups else 0


def has_slabs(like: Tensor, columns: Sequence[int], page_bytes: int) -> bool:
    """Are there operations on slabs of tensors ``like`` this one, so many columns wide?"""
    width = slab_width(like.dtype, page_bytes)
    return width > 0 and like.is_floating_point() and not any(c % width for c in columns)


def claim_slabs(
    ends_G: Tensor,
    rows: int,
    columns: Sequence[int],
    dtype: torch.dtype,
    table: Tensor,
    shift_G: Tensor,
    device_pages: Tensor,
    free_N: Tensor,
    state: Tensor,
    receipt: Tensor,
    *,
    page_bytes: int,
    number: int,
) -> None:
    """Take pages for matrices of so many columns, all or none, and write down where.

    Slabs of all matrices that are as high lie side by side in the table.

    Of the pages of the host none are taken; there must be none, or room enough without them.

    Args:
        ends_G: Ends of the groups; cut at ``rows``.
        rows: T, how many there is room for.
        columns: Of each matrix.
        table, free_N, state, receipt, number: As for :func:`stash_pages`.
        shift_G: int32, written.
    """
    ends_G = ends_G.clamp(0, rows)
    before_G = ends_G - ends_G.diff(prepend=ends_G.new_zeros(1))
    slabs_G = -((before_G - ends_G) // SLAB_ROWS)
    high = int(slabs_G.sum())
    needs = [high * (c // slab_width(dtype, page_bytes)) for c in columns]
    lengths = [int(ends_G[-1:].sum()) * c * dtype.itemsize for c in columns]
    size = device_pages.numel() // page_bytes
    pages = size, free_N.numel() - size
    # What gets no page has one past the last.
    table[TABLE_HEADER + 2 * len(columns) :] = size
    take_pages(lengths, needs, table, pages, free_N, state, receipt, number)
    shift_G.copy_((slabs_G.cumsum(0) - slabs_G) * SLAB_ROWS - before_G)


def slab_values(slabs: Slabs) -> Tensor:
    """The matrix in memory of its own; rows that are in no slab are zeros."""
    place_TS, is_there_TS = _places(slabs)
    pages = slabs.pages()
    values = torch.where(is_there_TS.unsqueeze(2), pages[place_TS], 0)
    return values.flatten(1)


def write_slabs(values_TK: Tensor, into: Slabs) -> None:
    """Write the valid rows of a matrix into its slabs; rows to spare become zeros."""
    place_TS, is_there_TS = _places(into)
    pages = into.pages()
    slots = into.table[into.first :][: _height(into) * into.pitch]
    claimed = F.pad(slots, (0, -len(slots) % into.pitch)).view(-1, into.pitch)
    claimed = claimed[:, : place_TS.shape[1]]
    whole = pages.view(-1, SLAB_ROWS, pages.shape[1])
    whole[claimed[claimed < len(whole)]] = 0
    pages[place_TS[is_there_TS]] = values_TK.unflatten(1, (-1, pages.shape[1]))[is_there_TS]


def permute_into_slabs(x_TH: Tensor, source_R: Tensor, into: Slabs) -> None:
    """Copy each valid row's token into its slab: ``into[r] = x_TH[source_R[r]]``."""
    write_slabs(permute(x_TH, source_R), into)


def grouped_mm_in_slabs(x: Slabs, w_GNK: Tensor, into: Slabs) -> None:
    """:func:`grouped_mm` of rows in slabs, into slabs of the same launch.

    Raises:
        ShapeError: the shapes do not fit each other.
        DtypeError: the dtypes differ.
    """
    check_into(x, w_GNK, into)
    write_slabs(grouped_mm(slab_values(x), w_GNK, x.ends_G), into)


def check_into(x: Slabs, w_GNK: Tensor, into: Slabs) -> None:
    """Refuse slabs of another shape than the product's: it would be written to other pages."""
    wanted = (x.shape[0], w_GNK.shape[1])
    if tuple(into.shape) != wanted:
        raise ShapeError(
            f"grouped_mm_in_slabs needs slabs for a result of shape {wanted}, got "
            f"{tuple(into.shape)}; claim them for as many columns as the weights have rows"
        )


def _height(slabs: Slabs) -> int:
    ends_G = slabs.ends_G.clamp(0, slabs.shape[0])
    counts_G = ends_G.diff(prepend=ends_G.new_zeros(1))
    return int((-(-counts_G // SLAB_ROWS)).sum())


def _places(slabs: Slabs) -> tuple[Tensor, Tensor]:
    """Of each row's part in each slab, which row of all pages it is, and whether it is in any."""
    rows, columns = slabs.shape
    strips = columns // slab_width(slabs.dtype, slabs.page_bytes)
    row_T = torch.arange(rows, device=slabs.device)
    ends_G = slabs.ends_G.long().clamp(0, rows)
    group_T = torch.searchsorted(ends_G, row_T, right=True).clamp(max=len(ends_G) - 1)
    is_valid_T = row_T < ends_G[-1]
    padded_T = torch.where(is_valid_T, row_T + slabs.shift_G[group_T], 0)
    strip_S = torch.arange(strips, device=slabs.device)
    slot_TS = (padded_T // SLAB_ROWS * slabs.pitch).unsqueeze(1) + strip_S
    page_TS = slabs.table[slabs.first + slot_TS]
    size = slabs.device_pages.numel() // slabs.page_bytes
    is_there_TS = is_valid_T.unsqueeze(1) & (page_TS < size)
    place_TS = page_TS * SLAB_ROWS + (padded_T % SLAB_ROWS).unsqueeze(1)
    return place_TS.where(is_there_TS, 0), is_there_TS
