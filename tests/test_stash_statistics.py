"""The statistics say what happened, and fit on a line."""

from __future__ import annotations

import dataclasses

import torch

import backstash as bs
from stash_cases import CAPACITY, PAGE, WIDTH, scale, stash

ROW = WIDTH * 4


def test_each_number_is_what_a_reader_would_count() -> None:
    kept = stash(40, 40, ahead=0)
    x = torch.randn(CAPACITY, WIDTH, requires_grad=True)
    with bs.saving(kept):
        y = scale(x, 40)
        y = scale(y, 11)
        y = scale(y, 24)
    pages = [-(-rows * ROW // PAGE) for rows in (40, 11, 24)]
    during = kept.stats()
    assert (during.device_used, during.host_used) == (38, 0)
    # Each function saves its rows and their number.
    assert (during.batches, during.offered) == (3, 6)
    assert during.bytes_stashed == (40 + 11 + 24) * ROW
    assert sum(pages) == 38
    y.sum().backward()
    after = kept.stats()
    assert (after.device_used, after.host_used) == (0, 0)
    assert (after.device_high, after.host_high, after.demand_high) == (38, 0, 38)
    # The last was still there; the others were copied back.
    assert after.untouched == 1
    assert after.bytes_restored == (40 + 11) * ROW
    assert (after.kept, after.waits, after.overflows, after.pages_spilled) == (0, 0, 0, 0)


def test_what_lies_on_the_host_is_counted_as_spilled() -> None:
    kept = stash(20, 40)
    with bs.saving(kept):
        y = scale(torch.randn(CAPACITY, WIDTH, requires_grad=True), 44)
    statistics = kept.stats()
    assert (statistics.device_used, statistics.host_used, statistics.pages_spilled) == (20, 2, 2)
    assert statistics.fill == 1.0
    del y


def test_the_line_has_fill_most_and_spill() -> None:
    statistics = dataclasses.replace(
        stash(8192).stats(), device_used=2048, device_high=4096, pages_spilled=4096
    )
    assert str(statistics) == (
        "stash 25% of 2 MiB full, most 1 MiB, spilled 1 MiB, kept 0 MiB, overflows 0"
    )


def test_the_line_says_where_nothing_was_marked() -> None:
    kept, x = stash(), torch.randn(CAPACITY, WIDTH, requires_grad=True)
    assert "took none" not in str(kept.stats())
    with bs.saving(kept):
        y = (x * x).exp()
    assert str(kept.stats()).endswith("took none of 3 tensors: mark their rows")
    with bs.saving(kept):
        y = scale(y, 3)
    assert "took none" not in str(kept.stats())
