"""The benchmark of the stash compares before it times, and prints the share of a copy first."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from backstash.bench import stash
from backstash.bench.timing import Pair
from backstash.errors import ConfigError, DeviceError

PAIR = Pair(ours_us=20.0, theirs_us=10.0, ratio=2.0, ratio_low=1.6, ratio_high=2.5, repeats=3)
ROW = stash.StashRow(
    case="stash",
    what="stash 64 bytes",
    values=4,
    target=0.85,
    pair=PAIR,
    device="a GPU",
    bytes_moved=80_000,
)
CPU = torch.device("cpu")


def test_without_a_gpu_it_says_that_it_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="run it on one"):
        stash.measure(1)


def test_rows_are_chosen_by_parts_of_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="restore 2048 bf16, few rows"):
        stash.measure(1, ["few columns"])


@pytest.mark.parametrize("work", stash.WORKS, ids=lambda work: work.what)
def test_every_work_gives_back_what_it_was_given(work: stash.Work) -> None:
    small = dataclasses.replace(work, buffers=tuple((r // 256, w) for r, w in work.buffers))
    pages = stash.Pages(small, CPU)
    for _ in range(2):
        pages.check(work.what)
    # The pool has room for two launches and no page more.
    pages.stash()
    pages.stash()
    with pytest.raises(RuntimeError, match="differ; nothing is timed"):
        pages.check(work.what)


@pytest.mark.parametrize("nbytes", [1, 511, 512, 1025, 4096])
@pytest.mark.parametrize("pieces", stash.PIECES)
def test_a_copy_in_pieces_copies_every_byte(nbytes: int, pieces: int) -> None:
    source = torch.randint(1, 256, (nbytes,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    stash.copy_in_pieces(target, source, pieces)
    assert torch.equal(target, source)


def test_half_a_copys_speed_is_a_share_of_a_half(capsys: pytest.CaptureFixture[str]) -> None:
    assert ROW.share == 0.5
    assert ROW.gigabytes_per_s == 4.0
    stash.show([ROW])
    printed = capsys.readouterr().out
    header = next(line for line in printed.splitlines() if "quartiles" in line)
    assert header.index("of a copy") < header.index("quartiles")
    assert "0.40-0.62" in printed
