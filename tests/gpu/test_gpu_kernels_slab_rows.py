"""Products of rows in slabs, into slabs, on a Hopper GPU: every bit that of rows together."""

from __future__ import annotations

import pytest
import torch

from backstash import kernels
from backstash.errors import ShapeError
from gathered_cases import by_half, by_many
from host_reads import no_host_reads
from slab_cases import ends_of, placed, spare_rows

pytestmark = pytest.mark.gpu
GPU = "cuda"


@by_many
@pytest.mark.parametrize(
    ("columns", "page"), [((2048, 1536), 65536), ((1024, 2048), 131072)], ids=str
)
@by_half
def test_every_bit_is_that_of_the_product_of_rows(
    counts: list[int], columns: tuple[int, int], page: int, dtype: torch.dtype
) -> None:
    (k, n), valid = columns, sum(counts)
    x = torch.randn(valid + 37, k, device=GPU, dtype=dtype)
    x[valid:] = float("nan")
    w = torch.randn(len(counts), n, k, device=GPU, dtype=dtype)
    ends = ends_of(counts, GPU)
    x_slabs, y_slabs = placed(ends, [x], page, more=[n])
    kernels.grouped_mm_in_slabs(x_slabs, w, y_slabs)
    assert torch.equal(kernels.slab_values(x_slabs)[:valid], x[:valid])
    found = kernels.slab_values(y_slabs)
    assert torch.equal(found[:valid], kernels.grouped_mm(x, w, ends)[:valid])
    assert not spare_rows(y_slabs).any()


def test_weights_whose_columns_lie_apart_are_multiplied_as_well() -> None:
    x = torch.randn(200, 512, device=GPU).bfloat16()
    w = torch.randn(3, 512, 512, device=GPU).bfloat16().mT
    ends = ends_of([70, 0, 100], GPU)
    x_slabs, y_slabs = placed(ends, [x], 65536, more=[512])
    with no_host_reads():
        kernels.grouped_mm_in_slabs(x_slabs, w, y_slabs)
    wanted = kernels.grouped_mm(x, w.contiguous(), ends)
    assert torch.equal(kernels.slab_values(y_slabs)[:170], wanted[:170])


def test_without_room_nothing_is_written() -> None:
    x = torch.randn(200, 512, device=GPU).bfloat16()
    w = torch.randn(2, 512, 512, device=GPU).bfloat16()
    ends = ends_of([70, 100], GPU)
    x_slabs, y_slabs = placed(ends, [x], 65536, more=[512], has_room=False)
    before = x_slabs.device_pages.clone()
    kernels.grouped_mm_in_slabs(x_slabs, w, y_slabs)
    assert torch.equal(x_slabs.device_pages, before)
    assert not kernels.slab_values(y_slabs).any()


def test_a_weight_of_other_features_is_refused() -> None:
    ends = ends_of([70], GPU)
    x, y = placed(ends, [torch.zeros(80, 512, device=GPU).bfloat16()], 65536, more=[512])
    with pytest.raises(ShapeError, match="grouped_mm_in_slabs"):
        kernels.grouped_mm_in_slabs(x, torch.zeros(1, 512, 256, device=GPU).bfloat16(), y)
