"""Operations on rows in slabs give what they give of rows that lie together."""

from __future__ import annotations

import pytest
import torch

from backstash import kernels
from backstash.errors import ShapeError
from backstash.kernels.reference.pages import RECEIPT_OVERFLOW, PoolState
from backstash.kernels.reference.slabs import SLAB_ROWS, write_slabs
from paged_cases import new_pool
from slab_cases import by_counts, claimed, ends_of, placed, spare_rows

NAN = float("nan")
PAGE = 1024  # four columns of float32
H, F = 8, 12


def matrix(counts: list[int], columns: int, tail: int = 7) -> torch.Tensor:
    values = torch.randn(sum(counts) + tail, columns)
    values[sum(counts) :] = NAN
    return values


@by_counts
def test_rows_come_back_and_what_is_behind_them_are_zeros(counts):
    ends, x, h = ends_of(counts, "cpu"), matrix(counts, H), matrix(counts, F)
    valid = sum(counts)
    for slabs, values in zip(placed(ends, [x, h], PAGE), (x, h), strict=True):
        found = kernels.slab_values(slabs)
        assert torch.equal(found[:valid], values[:valid])
        assert not found[valid:].any()
        assert not spare_rows(slabs).any()


def test_a_group_begins_with_a_slab_and_takes_no_more_than_it_has_rows_for():
    counts = [63, 0, 64, 65]
    pool = new_pool(100, 0, PAGE)
    claimed(pool, ends_of(counts, "cpu"), 200, [H, F], torch.float32)
    slabs = 1 + 0 + 1 + 2
    assert int(pool.state[PoolState.HIGH_DEVICE]) >= slabs * (H + F) // 4
    assert int(pool.receipt) == slabs * (H + F) // 4


def test_ends_past_the_buffer_are_cut():
    x = torch.randn(70, H)
    ends = torch.tensor([10, 900], dtype=torch.int32)
    (slabs,) = placed(ends, [x], PAGE)
    assert torch.equal(kernels.slab_values(slabs), x)


def test_tokens_are_copied_to_their_rows():
    counts = [5, 0, 100, 64]
    ends, tokens = ends_of(counts, "cpu"), torch.randn(30, H)
    source = torch.randint(0, 30, (180,))
    pool = new_pool(100, 0, PAGE)
    (slabs,) = claimed(pool, ends, 180, [H], torch.float32)
    kernels.permute_into_slabs(tokens, source, slabs)
    assert torch.equal(kernels.slab_values(slabs)[:169], tokens[source][:169])
    assert not spare_rows(slabs).any()


@by_counts
def test_products_and_the_activation_are_those_of_rows(counts):
    ends, x, valid = ends_of(counts, "cpu"), matrix(counts, H), sum(counts)
    w, prob = torch.randn(len(counts), F, H), torch.rand(len(x))
    x_slabs, h_slabs = placed(ends, [x], PAGE, more=[F])
    kernels.grouped_mm_in_slabs(x_slabs, w, h_slabs)
    h = kernels.grouped_mm(x, w, ends)
    assert torch.equal(kernels.slab_values(h_slabs), h)
    a = kernels.activate_slabs(h_slabs, prob, "swiglu")
    assert torch.equal(a[:valid], kernels.activate(h, prob, "swiglu")[:valid])
    da = torch.randn(len(x), F // 2)
    ours, theirs = (
        kernels.activate_backward(da, one, prob, "swiglu", None, ends) for one in (h_slabs, h)
    )
    assert torch.equal(ours[0][:valid], theirs[0][:valid])
    assert ours[1] is not None
    assert theirs[1] is not None
    assert torch.equal(ours[1], theirs[1])
    dy = torch.randn(len(x), 5)
    dw = kernels.grouped_mm_dw_of_pages(dy, x_slabs, ends)
    assert torch.equal(dw, kernels.grouped_mm_dw(dy, x, ends))


@pytest.mark.parametrize("shape", [(2, F + 1, H), (2, F, H + 1), (3, F, H)])
def test_weights_of_another_shape_are_refused(shape):
    counts = [70, 3]
    ends, x = ends_of(counts, "cpu"), matrix(counts, H)
    x_slabs, h_slabs = placed(ends, [x], PAGE, more=[F])
    with pytest.raises(ShapeError, match="; "):
        kernels.grouped_mm_in_slabs(x_slabs, torch.randn(shape), h_slabs)


def test_a_launch_without_room_claims_nothing_and_its_values_are_zeros():
    counts = [100, 3]
    x = torch.randn(120, H)
    (slabs,) = placed(ends_of(counts, "cpu"), [x], PAGE, has_room=False)
    assert slabs.table[:3].tolist() == [0, 0, 6]
    assert (slabs.device_pages == 0xFF).sum() in (0, PAGE)
    assert not kernels.slab_values(slabs).any()


def test_what_found_no_room_is_counted_like_any_launch():
    pool = new_pool(5, 0, PAGE)
    claimed(pool, ends_of([100, 3], "cpu"), 120, [H], torch.float32)
    assert int(pool.receipt) == RECEIPT_OVERFLOW
    assert int(pool.state[PoolState.OVERFLOWS]) == 1
    assert int(pool.state[PoolState.SHORTAGE]) == 1
    assert int(pool.state[PoolState.FIRST_OVERFLOW]) == 3 + 1


def test_what_is_written_stays_in_its_own_pages():
    pool = new_pool(40, 0, PAGE)
    pool.device_pages.fill_(0xFF)
    (slabs,) = claimed(pool, ends_of([70], "cpu"), 100, [H], torch.float32)
    write_slabs(torch.zeros(100, H), slabs)
    used = slabs.table[slabs.first :][:4].tolist()
    free = [page for page in range(40) if page not in used]
    assert (pool.device_pages.view(40, PAGE)[free] == 0xFF).all()


@pytest.mark.parametrize(
    ("columns", "page", "dtype", "wanted"),
    [
        ([8, 12], 1024, torch.float32, True),
        ([8, 10], 1024, torch.float32, False),
        ([8], 128, torch.float32, False),
        ([8], 1024, torch.int32, False),
    ],
)
def test_slabs_are_pages_of_whole_rows_of_floats(columns, page, dtype, wanted):
    assert kernels.has_slabs(torch.empty(0, dtype=dtype), columns, page) == wanted


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 1000])
@pytest.mark.parametrize("groups", [0, 1, 3, 70])
def test_as_many_slabs_as_the_worst_groups_need(rows, groups):
    few = min(groups, rows)
    # All groups but one have one row, or one more than whole slabs.
    worst = few - 1 + -(-(rows - few + 1) // SLAB_ROWS) if few else 0
    assert kernels.slabs_for(rows, groups) == worst
