"""Counting and sorting rows by expert: the reference, and its twins beside it.

The twins run in Triton's interpreter and on a GPU.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from backstash import kernels
from backstash.errors import DtypeError, ShapeError
from host_reads import no_host_reads
from interpreter import by_device, run_interpreted
from twin_cases import assert_twin_bytes

SIZES = [(1, 1, 1), (63, 2, 5), (70, 3, 30), (30, 8, 128), (20, 6, 300)]
by_size = pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))


def test_the_interpreted_kernels_pass_these_tests() -> None:
    run_interpreted(__file__)


def twin(name):
    return getattr(importlib.import_module("backstash.kernels.sorting"), name)


@by_device
@by_size
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("first", [0, -1], ids=["all", "nobody-too"])
def test_rows_are_counted_and_sorted_as_by_the_reference(size, dtype, first, device):
    tokens, top_k, experts = size
    expert_TK = torch.randint(first, experts - 2 * first, (tokens, top_k), dtype=dtype)
    wanted = kernels.sort_by_expert(expert_TK, experts)
    counts = kernels.count_experts(expert_TK, experts).counts_E
    expert_TK = expert_TK.to(device)
    twin("sort_by_expert")(expert_TK, experts)
    with no_host_reads(device):
        got = twin("sort_by_expert")(expert_TK, experts)
        tally = twin("count_experts")(expert_TK, experts)
        ends = torch.full((experts,), -1, dtype=torch.int32, device=device)
        of_tally = twin("sort_by_expert")(expert_TK, experts, tally=tally, ends_E=ends)
    for one, other in zip(got, wanted, strict=True):
        assert_twin_bytes(one, other)
    for one, other in zip(of_tally, wanted, strict=True):
        assert_twin_bytes(one, other)
    assert_twin_bytes(tally.counts_E, counts)
    assert torch.equal(counts, wanted[2])
    assert torch.equal(ends.cpu(), counts.cumsum(0).int())


@by_device
@pytest.mark.parametrize(("first", "kept"), [(0, 3), (2, 3), (5, 40), (7, 33), (-2, 5), (38, 9)])
@pytest.mark.parametrize("tallied", ["not", "these", "others"])
def test_some_experts_are_sorted_alone_whoever_counted_all(first, kept, tallied, device):
    expert_TK = torch.randint(0, 40, (180, 3))
    wanted = kernels.sort_by_expert(expert_TK - first, kept)
    for one, other in zip(kernels.sort_by_expert(expert_TK, kept, first), wanted, strict=True):
        assert torch.equal(one, other)
    expert_TK = expert_TK.to(device)
    counted = {"not": None, "these": expert_TK, "others": expert_TK.flip(0)}[tallied]
    tally = None if counted is None else twin("count_experts")(counted, 40)
    got = twin("sort_by_expert")(expert_TK, kept, first, tally)
    for one, other in zip(got, wanted, strict=True):
        assert_twin_bytes(one, other)


@by_device
@pytest.mark.parametrize("expert", [0, 4, 5], ids=["first", "last", "nobody"])
def test_one_expert_may_have_every_row_and_a_block_many(expert, device):
    expert_TK = torch.full((520, 2), expert, dtype=torch.int64)
    wanted = kernels.sort_by_expert(expert_TK, 5)
    for one, other in zip(twin("sort_by_expert")(expert_TK.to(device), 5), wanted, strict=True):
        assert_twin_bytes(one, other)


@by_device
@pytest.mark.parametrize("rows", [0, 1, 100, 600, 601, 2000])
def test_rows_past_the_room_are_cut_off_and_those_of_no_copy_are_token_zero(rows, device):
    expert_TK = torch.randint(0, 5, (300, 2))
    whole, slots, counts = kernels.sort_by_expert(expert_TK, 4)
    wanted = torch.zeros(rows, dtype=torch.int64)
    wanted[: len(whole)] = whole[:rows]
    ours = kernels.sort_by_expert(expert_TK, 4, rows=rows)
    for got in (ours, twin("sort_by_expert")(expert_TK.to(device), 4, rows=rows)):
        for one, other in zip(got, (wanted, slots, counts), strict=True):
            assert_twin_bytes(one, other)


@by_device
def test_without_tokens_nobody_has_rows(device):
    none = torch.empty(0, 2, dtype=torch.int64, device=device)
    ends = torch.full((3,), -1, dtype=torch.int32, device=device)
    source, slots, counts = twin("sort_by_expert")(none, 3, ends_E=ends)
    assert not ends.any()
    assert (source.shape, slots.shape, counts.tolist()) == ((0,), (0, 2), [0, 0, 0])


def test_what_does_not_fit_is_refused():
    whole = torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(ShapeError, match=r"count_experts needs \(T, K\)"):
        kernels.count_experts(whole[0], 2)
    with pytest.raises(DtypeError, match="count_experts needs expert numbers in int32 or int64"):
        kernels.count_experts(whole.float(), 2)
