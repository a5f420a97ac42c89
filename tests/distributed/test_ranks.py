"""Processes that check something are not waited for longer than one of them lives."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks as under_test
import torch
import torch.distributed as dist
from ranks import COLLECTIVE_S, Ranks

pytestmark = pytest.mark.distributed


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Ranks]:
    """Processes of this test alone, because they are killed."""
    two = Ranks(tmp_path, world=2)
    assert two.run(rank_of) == [0, 1]
    yield two
    two.stop()


def rank_of(group: dist.ProcessGroup) -> int:
    return dist.get_rank(group)


def fail_alone(group: dist.ProcessGroup, failing: int, way: str) -> None:
    """One rank fails; the other waits for it, in a collective or for ever."""
    if dist.get_rank(group) == failing:
        if way == "raises":
            raise ValueError("this one is wrong")
        os._exit(1)
    if way == "is killed":
        time.sleep(3600)
    dist.all_reduce(torch.ones(1), group=group)


@pytest.mark.parametrize(
    ("failing", "way", "words"),
    [(1, "raises", "this one is wrong"), (0, "is killed", "the process has gone")],
)
def test_when_one_rank_fails_the_others_are_not_waited_for(
    two: Ranks, failing: int, way: str, words: str
) -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match=words) as caught:
        two.run(fail_alone, failing, way)
    assert time.monotonic() - began < COLLECTIVE_S / 2
    assert f"rank {failing}:" in str(caught.value)
    if way == "raises":
        assert two.run(rank_of) == [0, 1], "the next check has no ranks"


def stall(group: dist.ProcessGroup) -> None:
    time.sleep(3600)


def test_ranks_that_do_not_answer_are_killed_in_the_end(
    two: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "ANSWER_S", 2)
    processes: list[Any] = list(two._processes)
    with pytest.raises(AssertionError, match="rank 0:\nno answer within 2 s"):
        two.run(stall)
    assert not any(process.is_alive() for process in processes)
