"""Two functions timed in turns give a ratio that a disturbance does not move."""

from __future__ import annotations

import gc
import time

from backstash.bench import timing


def test_a_function_is_as_fast_as_itself_and_slower_than_half_of_it() -> None:
    def once() -> None:
        sum(range(200))

    def twice() -> None:
        once()
        once()

    pair = timing.time_pair(twice, once, repeats=15)
    assert pair.ratio_low <= pair.ratio <= pair.ratio_high
    # Wide on purpose: this tells a ratio from its inverse, not one machine from another.
    assert 1.2 < pair.ratio < 3.5
    assert pair.repeats == 15


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
