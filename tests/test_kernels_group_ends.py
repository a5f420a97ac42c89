"""Groups are cut off where a buffer ends, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import importlib

import pytest
import torch

from backstash import kernels
from backstash.errors import DtypeError, ShapeError
from interpreter import by_device, run_interpreted

COUNTS = {
    "one": [5],
    "several": [3, 0, 5, 1, 0, 7],
    "nothing": [0, 0, 0],
    "int32-overflows": [2**31 - 1, 2**31 - 1, 3],
    "many": list(range(130)),
}
by_counts = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
by_rows = pytest.mark.parametrize("rows", [0, 1, 4, 9, 16, 10**6])


@pytest.mark.slow
def test_the_interpreted_kernels_pass_these_tests() -> None:
    run_interpreted(__file__)


def check(fitted, counts, rows):
    ends = [min(sum(counts[: g + 1]), rows) for g in range(len(counts))]
    assert fitted.ends_G.tolist() == ends
    assert fitted.counts_G.tolist() == [b - a for a, b in zip([0, *ends], ends, strict=False)]
    assert fitted.overflow.tolist() == [sum(counts) > rows]
    assert fitted.ends_G.dtype is fitted.counts_G.dtype is torch.int32
    assert fitted.overflow.dtype is torch.bool


@by_counts
@by_rows
def test_the_last_groups_rows_are_cut_off_first(counts, rows):
    check(kernels.fit_groups(torch.tensor(counts), rows), counts, rows)


@by_device
@by_counts
@by_rows
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_the_twin_cuts_off_the_same(counts, rows, dtype, device):
    twin = importlib.import_module("backstash.kernels.group_ends")
    check(twin.fit_groups(torch.tensor(counts, dtype=dtype, device=device), rows), counts, rows)


def test_what_are_no_counts_is_refused():
    with pytest.raises(ShapeError, match=r"got \(2, 1\)"):
        kernels.fit_groups(torch.ones(2, 1, dtype=torch.int32), 3)
    with pytest.raises(ShapeError, match=r"got \(0,\)"):
        kernels.fit_groups(torch.ones(0, dtype=torch.int32), 3)
    with pytest.raises(DtypeError, match="float32"):
        kernels.fit_groups(torch.ones(2), 3)
