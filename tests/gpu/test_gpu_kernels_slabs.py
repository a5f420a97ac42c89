"""Slabs are claimed and filled by kernels as the reference does it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from backstash import kernels
from backstash.kernels.reference import slabs as reference
from backstash.kernels.reference.pages import RECEIPT_PENDING
from host_reads import no_host_reads
from interpreter import by_device, run_interpreted
from paged_cases import new_pool
from slab_cases import by_counts, claimed, ends_of, spare_rows

pytest.importorskip("triton")
twins: Any = importlib.import_module("backstash.kernels.slabs")

PAGE, H, F = 65536, 1024, 1536


@pytest.mark.slow
def test_the_interpreted_kernels_pass_these_tests() -> None:
    run_interpreted(__file__)


@by_device
@by_counts
@pytest.mark.parametrize("pages", [0, 2, 3, 500])
def test_what_is_claimed_and_counted_is_what_the_reference_claims(
    counts: list[int], pages: int, device: str
) -> None:
    found = []
    for module in (reference, twins):
        pool = new_pool(max(pages, 1), 0, 512, device)
        # Both rings begin anew somewhere in the middle.
        ends = ends_of(counts, device)
        slabs = claimed(pool, ends, sum(counts) + 3, [4, 12], torch.bfloat16, module)
        last = slabs[0].first + sum(-(-c // 64) for c in counts) * slabs[0].pitch
        table = slabs[0].table[:last]
        found.append([table.cpu(), slabs[0].shift_G.cpu(), pool.state.cpu(), pool.receipt.clone()])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@by_device
def test_a_buffer_without_rows_takes_no_pages_and_says_so(device: str) -> None:
    found = []
    for module in (reference, twins):
        pool = new_pool(3, 0, 512, device)
        pool.receipt.fill_(RECEIPT_PENDING)
        slabs = claimed(pool, ends_of([0, 0], device), 0, [4, 12], torch.bfloat16, module)
        if device == "cuda":
            torch.cuda.synchronize()
        assert int(pool.receipt) == 0
        found.append([slabs[0].table.cpu(), slabs[0].shift_G.cpu(), pool.state.cpu()])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@by_device
@by_counts
@pytest.mark.parametrize("has_room", [True, False], ids=["room", "no room"])
def test_tokens_are_copied_to_their_rows(counts: list[int], has_room: bool, device: str) -> None:
    valid = sum(counts)
    columns = [512, 1024] if device == "cpu" else [H, F]
    tokens = torch.randn(50, columns[0], device=device).bfloat16()
    source = torch.randint(0, 50, (valid + 9,), device=device)
    pool = new_pool(60 if has_room else 1, 0, PAGE, device)
    pool.device_pages.fill_(0xFF)
    given = pool, ends_of(counts, device), valid + 9, columns, torch.bfloat16, twins
    slabs, _ = claimed(*given)
    twins.permute_into_slabs(tokens, source, slabs)
    if has_room or not valid:
        assert torch.equal(kernels.slab_values(slabs)[:valid], tokens[source][:valid])
        assert not spare_rows(slabs).any()
    else:
        assert (pool.device_pages == 0xFF).all()


@pytest.mark.gpu
def test_nothing_is_read_on_the_host() -> None:
    tokens = torch.randn(50, H, device="cuda").bfloat16()
    source = torch.randint(0, 50, (300,), device="cuda")
    pool, ends = new_pool(60, 0, PAGE, "cuda"), ends_of([100, 150], "cuda")
    with no_host_reads():
        (slabs,) = claimed(pool, ends, 300, [H], torch.bfloat16, twins)
        twins.permute_into_slabs(tokens, source, slabs)
        values = kernels.slab_values(slabs)
    assert torch.equal(values[:250], tokens[source][:250])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "columns", "page", "wanted"),
    [
        (torch.bfloat16, [2048, 1536], 65536, True),
        (torch.float16, [3072], 131072, True),
        (torch.bfloat16, [2048, 1280], 65536, False),
        (torch.bfloat16, [2048], 32768, False),
        (torch.float32, [2048], 65536, False),
    ],
)
def test_slabs_are_as_wide_as_tiles_of_the_products(
    dtype: torch.dtype, columns: list[int], page: int, wanted: bool
) -> None:
    like = torch.empty(0, dtype=dtype, device="cuda")
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    assert kernels.has_slabs(like, columns, page) == (wanted and is_hopper)
