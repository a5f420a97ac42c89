"""Two functions timed in turns give a ratio that a disturbance does not move."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pytest
import torch

from backstash.bench import timing


class Clock:
    """Time that passes only where a function says so, or where something disturbs the machine."""

    def __init__(self) -> None:
        self.now_ns = 0

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def call_of(self, duration_ns: int) -> Callable[[], None]:
        def call() -> None:
            self.now_ns += duration_ns

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing.time, "perf_counter_ns", clock.perf_counter_ns)
    return clock


def test_the_ratio_is_ours_by_theirs(clock: Clock) -> None:
    pair = timing.time_pair(clock.call_of(3000), clock.call_of(1500), repeats=15)
    assert (pair.ratio_low, pair.ratio, pair.ratio_high) == (2.0, 2.0, 2.0)
    assert (pair.ours_us, pair.theirs_us, pair.repeats) == (3.0, 1.5, 15)


def test_a_disturbance_of_some_turns_leaves_the_ratio_alone(clock: Clock) -> None:
    slow_from, slow_until = 60_000_000, 90_000_000

    def disturbed(duration_ns: int) -> Callable[[], None]:
        def call() -> None:
            clock.now_ns += duration_ns * (9 if slow_from < clock.now_ns < slow_until else 1)

        return call

    assert timing.time_pair(disturbed(2000), disturbed(1000), repeats=31).ratio == 2.0


def test_both_are_called_equally_often_whoever_is_faster() -> None:
    calls = {"fast": 0, "slow": 0}

    def fast() -> None:
        calls["fast"] += 1

    def slow() -> None:
        calls["slow"] += 1
        time.sleep(0.001)

    timing.time_pair(fast, slow, repeats=3)
    assert calls["fast"] == calls["slow"]


def test_the_collector_is_left_as_it_was() -> None:
    assert gc.isenabled()
    timing.time_pair(lambda: None, lambda: None, repeats=1)
    assert gc.isenabled()


@pytest.mark.gpu
def test_a_queued_call_is_one_of_several() -> None:
    calls = {"ours": 0, "theirs": 0}
    x = torch.zeros(2**20, device="cuda")

    def counted(name: str, times: int) -> Callable[[], None]:
        def run() -> None:
            calls[name] += 1
            for _ in range(times):
                x.add_(1)

        return run

    pair = timing.time_queued(counted("ours", 1), counted("theirs", 20), repeats=5, calls=8)
    assert calls["ours"] == calls["theirs"] == 8 * (5 + 2)
    assert 0 < pair.ours_us < pair.theirs_us
