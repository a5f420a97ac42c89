"""The benchmark of grouped matmuls compares before it times, and its groups share all rows."""

from __future__ import annotations

import pytest
import torch

from backstash.bench import grouped_mm
from backstash.bench.timing import Pair
from backstash.errors import DeviceError

PAIR = Pair(ours_us=20.0, theirs_us=10.0, ratio=2.0, ratio_low=1.6, ratio_high=2.5, repeats=3)


def test_without_a_gpu_it_says_that_it_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="run it on one"):
        grouped_mm.measure(1)


@pytest.mark.parametrize("load", grouped_mm.TARGETS)
@pytest.mark.parametrize(("rows", "groups"), [(8, 8), (100, 8), (4096, 128)])
def test_the_groups_share_all_rows_and_none_is_empty(rows: int, groups: int, load: str) -> None:
    count_G = grouped_mm.group_ends(rows, groups, load).diff(prepend=torch.tensor([0]))
    assert count_G.sum() == rows
    assert count_G.min() >= 1
    if load == "balanced":
        assert count_G.max() - count_G.min() <= groups


def test_outputs_that_differ_are_not_timed() -> None:
    x = torch.ones(4)
    grouped_mm.check_outputs("forward", x, x)
    for other in (2 * x, torch.full((4,), torch.nan)):
        with pytest.raises(RuntimeError, match="nothing is timed"):
            grouped_mm.check_outputs("forward", other, x)


def test_the_share_of_torchs_speed_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    row = grouped_mm.MatmulRow(
        case="grouped_mm",
        what="forward",
        values=4,
        target=0.97,
        pair=PAIR,
        device="a GPU",
        features=(2, 3),
        groups=2,
        tflops=1.0,
    )
    grouped_mm.show([row])
    printed = capsys.readouterr().out
    header = next(line for line in printed.splitlines() if "quartiles" in line)
    assert header.index("of torch") < header.index("quartiles")
    assert row.share == 0.5
