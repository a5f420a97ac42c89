"""Operations on rows in pages give every bit that they give for the rows themselves."""

from __future__ import annotations

import pytest
import torch

from backstash import kernels
from backstash.kernels import ActivationGradients
from paged_cases import in_pages, new_pool
from pages_cases import Pool

ROWS, PAGE = 37, 64


def pool(pages: int = 4096, host_pages: int = 0) -> Pool:
    return new_pool(pages, host_pages, PAGE)


@pytest.mark.parametrize("valid", [0, 1, 16, 36, 37, 99])
@pytest.mark.parametrize("pages", [4096, 5], ids=["device", "both tiers"])
def test_the_valid_rows_are_those_that_were_stashed(valid: int, pages: int) -> None:
    x, prob = torch.randn(ROWS, 20), torch.rand(ROWS)
    for given, paged in zip((x, prob), in_pages(pool(pages, 4096), valid, x, prob), strict=True):
        values = kernels.page_values(paged)
        assert (values.shape, values.dtype, paged.device) == (
            given.shape,
            given.dtype,
            given.device,
        )
        assert torch.equal(values[:valid], given[:valid])
        assert not values[valid:].any()
    assert paged.row_bytes == 4


def test_rows_of_a_launch_without_room_are_zeros() -> None:
    (paged,) = in_pages(pool(2), ROWS, torch.ones(ROWS, 20))
    assert torch.equal(kernels.page_values(paged), torch.zeros(ROWS, 20))


@pytest.mark.parametrize("counts", [(7, 0, 12), (0, 0, 0), (0, 30, 0), (1, 2, 34)], ids=str)
def test_a_weight_gradient_is_that_of_the_rows(counts: tuple[int, ...]) -> None:
    dy, x = torch.randn(ROWS, 6), torch.randn(ROWS, 20)
    ends = torch.tensor(counts).cumsum(0).int()
    valid = sum(counts)
    x[valid:], dy[valid:] = torch.nan, torch.nan
    (paged,) = in_pages(pool(), valid, x)
    assert kernels.multiplies_pages(paged)
    wanted = kernels.grouped_mm_dw(dy, x, ends)
    assert torch.equal(kernels.grouped_mm_dw_of_pages(dy, paged, ends), wanted)


@pytest.mark.parametrize("activation", kernels.ACTIVATIONS)
@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
def test_an_activation_backward_is_that_of_the_rows(activation: str, is_weighted: bool) -> None:
    valid, columns = 23, 20 if kernels.ACTIVATIONS[activation] else 10
    da, h, prob = torch.randn(ROWS, 10), torch.randn(ROWS, columns), torch.rand(ROWS)
    h[valid:], prob[valid:] = torch.nan, torch.nan
    paged_h, paged_prob = in_pages(pool(), valid, h, prob)
    assert kernels.activates_pages(paged_h, activation)
    assert kernels.activates_pages(paged_prob, activation)
    found = []
    for given in ((h, prob), (paged_h, paged_prob)):
        into = ActivationGradients(
            torch.empty_like(h), torch.zeros(ROWS) if is_weighted else None, torch.empty_like(da)
        )
        weights = given[1] if is_weighted else None
        kernels.activate_backward(da, given[0], weights, activation, into)
        found.append([one[:valid] for one in into if one is not None])
    assert len(found[0]) == 2 + is_weighted
    assert all(map(torch.equal, *found))
