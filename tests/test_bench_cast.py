"""The benchmark of casts compares before it times, and prints the share of a copy first."""

from __future__ import annotations

import pytest
import torch

from backstash.bench import cast
from backstash.bench.timing import Pair
from backstash.errors import DeviceError

PAIR = Pair(ours_us=20.0, theirs_us=10.0, ratio=2.0, ratio_low=1.6, ratio_high=2.5, repeats=3)
ROW = cast.CastRow(
    case="cast",
    what="mxfp8 rows",
    values=4,
    target=0.85,
    pair=PAIR,
    device="a GPU",
    columns=32,
    bytes_moved=400,
)


def test_without_a_gpu_it_says_that_it_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="run it on one"):
        cast.measure(1)


def test_outputs_that_differ_in_a_bit_are_not_timed() -> None:
    ones = torch.ones(4, dtype=torch.uint8)
    cast.check_outputs("a cast", cast.flat(((ones, ones), ones)), [ones, ones, ones])
    with pytest.raises(RuntimeError, match="nothing is timed"):
        cast.check_outputs("a cast", [torch.zeros(2)], [torch.full((2,), -0.0)])


def test_half_a_copys_speed_is_a_share_of_a_half(capsys: pytest.CaptureFixture[str]) -> None:
    assert ROW.share == 0.5
    cast.show([ROW])
    printed = capsys.readouterr().out
    header = next(line for line in printed.splitlines() if "quartiles" in line)
    assert header.index("of a copy") < header.index("quartiles")
    assert "0.40-0.62" in printed
