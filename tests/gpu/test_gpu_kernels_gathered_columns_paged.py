"""The gradient of a weight from rows in pages on a Hopper GPU: every bit that of rows together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from backstash import kernels
from backstash.kernels import PagedRows
from gathered_cases import by_half, by_many
from host_reads import no_host_reads
from paged_cases import in_pages, new_pool

pytestmark = pytest.mark.gpu
NAN = float("nan")
GPU = "cuda"


def operands(
    counts: list[int], sizes: tuple[int, int], tail: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient, the rows, and the ends of their groups; the tail is NaN."""
    n, k = sizes
    rows = sum(counts) + tail
    dy = torch.randn(rows, n, device=GPU, dtype=dtype)
    x = torch.randn(rows, k, device=GPU, dtype=dtype)
    dy[sum(counts) :], x[sum(counts) :] = NAN, NAN
    return dy, x, torch.tensor(counts, device=GPU).cumsum(0).int()


def placed(x: Tensor, valid: int, page: int, *, host: bool = False) -> PagedRows:
    # It is the second of two buffers, of which the first has a byte a row.
    pages = -(-max(valid, 1) * x.shape[1] * x.element_size() // page) + -(-valid // page) + 1
    pool = new_pool(pages // 2 if host else pages, pages if host else 0, page, GPU)
    first, second = in_pages(pool, valid, torch.ones(len(x), dtype=torch.uint8, device=GPU), x)
    assert int(first.table[2]) == 0
    return second


@by_many
@pytest.mark.parametrize(
    ("sizes", "page"),
    [((1536, 2048), 65536), ((208, 384), 4096), ((64, 128), 256)],
    ids=str,
)
@by_half
def test_every_bit_is_that_of_the_product_of_rows(
    counts: list[int], sizes: tuple[int, int], page: int, dtype: torch.dtype
) -> None:
    dy, x, ends = operands(counts, sizes, 37, dtype)
    wanted = kernels.grouped_mm_dw(dy, x, ends)
    paged = placed(x, sum(counts), page)
    assert kernels.multiplies_pages(paged)
    kernels.grouped_mm_dw_of_pages(dy, paged, ends)
    with no_host_reads():
        found = [kernels.grouped_mm_dw_of_pages(dy, paged, ends) for _ in range(3)]
    assert all(torch.equal(one, wanted) for one in found)


def test_rows_whose_pages_begin_inside_a_row_are_found() -> None:
    # 3072 bytes a row: 21 and a third in a page.
    dy, x, ends = operands([700, 0, 333, 64, 1], (512, 1536), 100, torch.bfloat16)
    paged = placed(x, 1098, 65536)
    wanted = kernels.grouped_mm_dw(dy, x, ends)
    assert torch.equal(kernels.grouped_mm_dw_of_pages(dy, paged, ends), wanted)


def test_pages_of_both_tiers_are_read() -> None:
    dy, x, ends = operands([100, 30, 70], (96, 256), 11, torch.bfloat16)
    paged = placed(x, 200, 4096, host=True)
    assert int(paged.table[1]) > 0
    wanted = kernels.grouped_mm_dw(dy, x, ends)
    assert torch.equal(kernels.grouped_mm_dw_of_pages(dy, paged, ends), wanted)


def test_rows_of_a_launch_without_room_are_zeros() -> None:
    dy, x, ends = operands([100, 30, 70], (96, 256), 11, torch.bfloat16)
    (paged,) = in_pages(new_pool(7, 0, 4096, GPU), 200, x)
    assert int(paged.table[2]) > 0
    assert not kernels.grouped_mm_dw_of_pages(dy, paged, ends).any()


def test_what_no_kernel_reads_in_pages_is_known() -> None:
    def paged(columns: int, dtype: Any = torch.bfloat16, page: int = 4096) -> PagedRows:
        none = torch.empty(0, device=GPU)
        return PagedRows(none, none, none, 0, 1, page, dtype, torch.Size((9, columns)))

    assert kernels.multiplies_pages(paged(384))
    assert not kernels.multiplies_pages(paged(320))
    assert not kernels.multiplies_pages(paged(384, page=128))
    assert not kernels.multiplies_pages(paged(384, torch.float32))
