"""Counts in any form become running ends on the device, and mistakes on the host are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backstash.errors import DtypeError, ShapeError
from backstash.nn.group_ends import AddedUp, group_ends

CPU = torch.device("cpu")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(0, 5))
def test_ends_are_the_running_sum_in_any_form(counts: list[int], tail: int) -> None:
    ends = [sum(counts[: g + 1]) for g in range(len(counts))]
    for form in (counts, tuple(counts), torch.tensor(counts), torch.tensor(counts).int()):
        found = group_ends(form, len(counts), sum(counts) + tail, CPU)
        assert found.tolist() == ends
        assert found.dtype is torch.int32


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(0, 40))
def test_device_counts_that_do_not_fit_are_cut_off(counts: list[int], rows: int) -> None:
    ends = group_ends(torch.tensor(counts), len(counts), rows, CPU).tolist()
    assert ends == [min(sum(counts[: g + 1]), rows) for g in range(len(counts))]


def test_counts_whose_sum_overflows_int32_are_cut_off_too() -> None:
    counts = torch.full((4,), 2**31 - 1, dtype=torch.int32)
    assert group_ends(counts, 4, 10, CPU).tolist() == [10, 10, 10, 10]


@pytest.mark.parametrize(
    ("m_splits", "error", "words"),
    [
        ([1, 2], ShapeError, r"each of 3 groups, got shape \(2,\)"),
        ([], ShapeError, r"each of 3 groups, got shape \(0,\)"),
        (torch.ones(3, 1, dtype=torch.int64), ShapeError, r"got shape \(3, 1\)"),
        (torch.tensor(3), ShapeError, r"got shape \(\)"),
        ([1, -1, 1], ShapeError, "must not be negative"),
        (torch.tensor([1, -1, 1]), ShapeError, "must not be negative"),
        ([5, 5, 1], ShapeError, "add up to 11 rows and the input has only 10"),
        ([1.0, 2.0, 3.0], DtypeError, "whole numbers"),
        (torch.ones(3), DtypeError, "must be integers, got torch.float32"),
        (torch.ones(3, dtype=torch.bool), DtypeError, "must be integers, got torch.bool"),
        (3, DtypeError, "list or an integer tensor.*got int"),
        (None, DtypeError, "list or an integer tensor.*got NoneType"),
        ("abc", DtypeError, "list or an integer tensor.*got str"),
    ],
    ids=str,
)
def test_counts_that_cannot_be_are_refused(m_splits: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        group_ends(m_splits, 3, 10, CPU)


def test_what_is_added_up_is_taken_as_it_is() -> None:
    ends_G = torch.tensor([2, 2, 7], dtype=torch.int32)
    assert group_ends(AddedUp(ends_G, 9), 3, 9, CPU) is ends_G


@pytest.mark.parametrize(("groups", "rows"), [(4, 9), (3, 8)])
def test_what_is_added_up_for_other_rows_is_refused(groups: int, rows: int) -> None:
    added_up = AddedUp(torch.tensor([2, 2, 7], dtype=torch.int32), 9)
    with pytest.raises(ShapeError, match=f"3 groups in 9 rows, and there are {groups} groups"):
        group_ends(added_up, groups, rows, CPU)
