"""The gradient of a weight from rows in slabs on a Hopper GPU: every bit that of rows together."""

from __future__ import annotations

import pytest
import torch

from backstash import kernels
from gathered_cases import by_half, by_many
from host_reads import no_host_reads
from slab_cases import ends_of, placed

pytestmark = pytest.mark.gpu
GPU = "cuda"


@by_many
@pytest.mark.parametrize(
    ("n", "k", "page"), [(1536, 2048, 65536), (208, 512, 65536), (64, 1024, 131072)]
)
@by_half
def test_every_bit_is_that_of_the_product_of_rows(
    counts: list[int], n: int, k: int, page: int, dtype: torch.dtype
) -> None:
    valid = sum(counts)
    x = torch.randn(valid + 37, k, device=GPU, dtype=dtype)
    dy = torch.randn(valid + 37, n, device=GPU, dtype=dtype)
    x[valid:] = dy[valid:] = float("nan")
    ends = ends_of(counts, GPU)
    _, slabs = placed(ends, [x, x], page)
    assert kernels.multiplies_pages(slabs)
    with no_host_reads():
        found = kernels.grouped_mm_dw_of_pages(dy, slabs, ends)
    assert torch.equal(found, kernels.grouped_mm_dw(dy, x, ends))


def test_rows_of_a_launch_without_room_are_zeros() -> None:
    x = torch.randn(200, 512, device=GPU).bfloat16()
    ends = ends_of([100, 30, 70], GPU)
    (slabs,) = placed(ends, [x], 65536, has_room=False)
    assert not kernels.grouped_mm_dw_of_pages(x, slabs, ends).any()
