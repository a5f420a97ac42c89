"""Kernels read rows where their pages are, and every bit is that of rows that lie together."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from backstash.kernels import ActivationGradients, PagedRows
from interpreter import by_device, run_interpreted
from paged_cases import in_pages, new_pool

pytest.importorskip("triton")
twins: Any = importlib.import_module("backstash.kernels.activation")

NAN = float("nan")


@pytest.mark.slow
def test_the_interpreted_kernels_pass_these_tests() -> None:
    run_interpreted(__file__)


def gradients(da: Tensor, h: Tensor, *, is_weighted: bool) -> ActivationGradients:
    """Where backward writes."""
    dprob = torch.full((len(h),), NAN, device=h.device) if is_weighted else None
    return ActivationGradients(torch.full_like(h, NAN), dprob, torch.full_like(da, NAN))


CASES = [
    ("swiglu", 2048, 64, True),
    ("swiglu", 512, 16, False),
    ("relu", 1024, 256, True),
    ("geglu", 16384, 256, True),
    ("silu", 4096, 512, False),
]


@by_device
@pytest.mark.parametrize(("activation", "page", "columns", "is_weighted"), CASES, ids=str)
@pytest.mark.parametrize("valid", [0, 1, 13, 40])
def test_an_activation_backward_reads_pages(
    valid: int, activation: str, page: int, columns: int, is_weighted: bool, device: str
) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    rows, is_gated = 40, activation.endswith("glu")
    h = torch.randn(rows, columns * (2 if is_gated else 1), dtype=dtype, device=device)
    da = torch.randn(rows, columns, dtype=dtype, device=device)
    prob = torch.rand(rows, device=device)
    for tail in (h, da, prob):
        tail[valid:] = NAN
    pool = new_pool(600, 0, page, device)
    paged = in_pages(pool, valid, h, prob)
    assert all(twins.activates_pages(one, activation) for one in paged)
    ends = torch.tensor([valid // 3, valid], dtype=torch.int32, device=device)
    found = []
    for values, weights, ends_G in (
        (h, prob, None),
        (h, prob, ends),
        (paged[0], paged[1], ends),
        (paged[0], prob, ends),
        (h, paged[1], ends),
        (paged[0], paged[1], None),
    ):
        into = gradients(da, h, is_weighted=is_weighted)
        weights = weights if is_weighted else None
        twins.activate_backward(da, values, weights, activation, into, ends_G)
        found.append([one[:valid] for one in into if one is not None])
        if values is paged[0] or ends_G is not None:
            # Of rows that are not there nothing is written, but that their weights have no share.
            assert into.dh_TF[valid:].isnan().all()
            assert into.dprob_T is None or not into.dprob_T[valid:].any()
    for one in found[1:]:
        assert all(map(torch.equal, found[0], one))


@by_device
@pytest.mark.parametrize("valid", [0, 1, 13, 40])
def test_an_activation_leaves_out_the_tail(valid: int, device: str) -> None:
    h, prob = torch.randn(40, 128, device=device), torch.rand(40, device=device)
    ends = torch.tensor([valid // 3, valid], dtype=torch.int32, device=device)
    wanted = twins.activate(h, prob, "swiglu")
    found = twins.activate(h, prob, "swiglu", ends)
    assert torch.equal(found[:valid], wanted[:valid])
    assert found[valid:].isnan().all()  # what fresh memory is full of


@by_device
def test_pages_of_both_tiers_are_read(device: str) -> None:
    h, da = torch.randn(40, 128, device=device), torch.randn(40, 64, device=device)
    pool = new_pool(8, 60, 512, device)
    (paged,) = in_pages(pool, 40, h)
    assert int(paged.table[0]) == 8
    found = []
    for values in (h, paged):
        into = gradients(da, h, is_weighted=False)
        twins.activate_backward(da, values, None, "swiglu", into)
        found.append(into)
    assert torch.equal(found[0].dh_TF, found[1].dh_TF)


@by_device
def test_rows_of_a_launch_without_room_are_zeros(device: str) -> None:
    h, da, prob = (torch.ones(40, n, device=device) for n in (128, 64, 1))
    prob = prob.flatten()
    pool = new_pool(8, 0, 512, device)
    paged_h, paged_prob = in_pages(pool, 33, h, prob)
    assert int(paged_h.table[2]) > 0
    into = gradients(da, h, is_weighted=True)
    twins.activate_backward(da, paged_h, paged_prob, "swiglu", into)
    assert into.dprob_T is not None
    assert into.a_TI is not None
    assert not any(one[:33].any() for one in (into.dh_TF, into.dprob_T, into.a_TI))


def test_what_no_kernel_reads_in_pages_is_known() -> None:
    def paged(*shape: int, dtype: torch.dtype = torch.bfloat16, page: int = 1024) -> PagedRows:
        none = torch.empty(0)
        return PagedRows(none, none, none, 0, 1, page, dtype, torch.Size(shape))

    assert twins.activates_pages(paged(9, 1536), "swiglu")
    assert twins.activates_pages(paged(9, 64), "swiglu")
    assert twins.activates_pages(paged(9), "swiglu")
    # Half a row is no whole chunks; a chunk is larger than a page; float64 has no kernels.
    assert not twins.activates_pages(paged(9, 600), "swiglu")
    assert not twins.activates_pages(paged(9, 40), "swiglu")
    assert not twins.activates_pages(paged(9, 1536, page=256), "swiglu")
    assert not twins.activates_pages(paged(9, 1536, dtype=torch.float64), "swiglu")
    assert not twins.activates_pages(paged(9, 2, 16), "swiglu")
