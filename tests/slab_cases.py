"""Matrices in slabs of pages that lie in no order, beside the matrices themselves."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from torch import Tensor

from backstash.kernels import Slabs, slab_width, slabs_for, table_length
from backstash.kernels.reference import slabs as reference
from backstash.kernels.reference.pages import TABLE_HEADER
from paged_cases import new_pool
from pages_cases import Pool

#: Rows of each group: none, one, about a slab, and many.
COUNTS = [[0], [0, 0, 5], [63, 64, 65], [1, 0, 130, 0, 257], [300, 0, 0, 1]]
by_counts = pytest.mark.parametrize("counts", COUNTS, ids=str)


def ends_of(counts: Sequence[int], device: str) -> Tensor:
    return torch.tensor(list(counts), device=device).cumsum(0).int()


def claimed(
    pool: Pool,
    ends_G: Tensor,
    rows: int,
    columns: Sequence[int],
    dtype: torch.dtype,
    twins: ModuleType = reference,
) -> list[Slabs]:
    """Slabs for matrices of one launch."""
    width = slab_width(dtype, pool.page_bytes)
    pitch = sum(c // width for c in columns)
    slots = slabs_for(rows, len(ends_G)) * pitch
    length, device = table_length(len(columns), slots), pool.device
    table = torch.full((length,), -7, dtype=torch.int64, device=device)
    shift_G = torch.full((len(ends_G),), -7, dtype=torch.int32, device=device)
    twins.claim_slabs(
        ends_G,
        rows,
        columns,
        dtype,
        table,
        shift_G,
        pool.device_pages,
        pool.free_N,
        pool.state,
        pool.receipt,
        page_bytes=pool.page_bytes,
        number=3,
    )
    first, found = TABLE_HEADER + 2 * len(columns), []
    for c in columns:
        size = torch.Size((rows, c))
        given = pool.device_pages, table, ends_G, shift_G, first, pitch
        found.append(Slabs(*given, pool.page_bytes, dtype, size))
        first += c // width
    return found


def placed(
    ends_G: Tensor,
    matrices: Sequence[Tensor],
    page_bytes: int,
    *,
    has_room: bool = True,
    more: Sequence[int] = (),
) -> list[Slabs]:
    """Matrices in slabs, and more slabs beside that nobody has written."""
    dtype, rows = matrices[0].dtype, len(matrices[0])
    columns = [*[m.shape[1] for m in matrices], *more]
    width = slab_width(dtype, page_bytes)
    pages = slabs_for(rows, len(ends_G)) * sum(c // width for c in columns) + 3
    pool = new_pool(pages if has_room else 1, 0, page_bytes, matrices[0].device.type)
    found = claimed(pool, ends_G, rows, columns, dtype)
    for matrix, slabs in zip(matrices, found, strict=False):
        reference.write_slabs(matrix, slabs)
    return found


def spare_rows(slabs: Slabs) -> Tensor:
    """What lies in the rows that the last slabs of groups have to spare."""
    ends = slabs.ends_G.tolist()
    strips = slabs.shape[1] // slabs.pages().shape[1]
    found, start, high = [torch.zeros(0, slabs.pages().shape[1])], 0, 0
    for end in ends:
        slabs_of_group = -(-(end - start) // reference.SLAB_ROWS)
        left = (end - start) % reference.SLAB_ROWS
        if left:
            place = slabs.first + (high + slabs_of_group - 1) * slabs.pitch
            for page in slabs.table[place : place + strips].tolist():
                rows = slabs.pages()[page * reference.SLAB_ROWS :][: reference.SLAB_ROWS]
                found.append(rows[left:].cpu().float())
        high, start = high + slabs_of_group, end
    return torch.cat(found)
