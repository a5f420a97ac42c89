"""Two pieces of code timed against each other on a machine that is busy with other things.

The two are timed in turns, a short batch of each, and the ratio is taken within a turn: a
disturbance that lasts longer than a turn slows both and leaves the ratio alone, and one that
is shorter spoils one turn, which the median over all of them ignores.  Who goes first
alternates, because the second of two finds the caches warm.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable

import torch

BATCH_S = 0.004


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Medians over all turns: microseconds a call, and ours divided by theirs."""

    ours_us: float
    theirs_us: float
    ratio: float
    ratio_low: float
    ratio_high: float
    repeats: int


def time_pair(ours: Callable[[], object], theirs: Callable[[], object], repeats: int) -> Pair:
    """Time two functions in turns; ``ratio_low`` and ``ratio_high`` are the quartiles."""
    calls = max(1, min(_calls_that_fill(ours), _calls_that_fill(theirs)))
    turns: list[tuple[float, float]] = []
    was_collecting = gc.isenabled()
    gc.disable()  # a collection in one batch would be billed to it alone
    try:
        for turn in range(repeats):
            if turn % 2:
                second = _batch_us(theirs, calls)
                first = _batch_us(ours, calls)
            else:
                first = _batch_us(ours, calls)
                second = _batch_us(theirs, calls)
            turns.append((first, second))
    finally:
        if was_collecting:
            gc.enable()
    return pair_of_turns(turns)


def time_gpu_pair(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    repeats: int,
    between: Callable[[], object] = lambda: None,
) -> Pair:
    """Time two functions on the current GPU in turns, by the GPU's own clock.

    Each is captured into a graph, so that the time it takes to launch is no part of it.
    ``between`` runs after every turn and is not timed.
    """
    return time_gpu_turns(_captured(ours).replay, _captured(theirs).replay, repeats, between)


def time_gpu_turns(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    repeats: int,
    between: Callable[[], object] = lambda: None,
) -> Pair:
    """The same for functions that are called as they are: where the host is slower, it counts."""
    turns: list[tuple[float, float]] = []
    for turn in range(repeats + 2):
        times = [0.0, 0.0]
        for i in (0, 1) if turn % 2 else (1, 0):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            (ours, theirs)[i]()
            end.record()
            end.synchronize()
            times[i] = start.elapsed_time(end) * 1000
        turns.append((times[0], times[1]))
        between()
    return pair_of_turns(turns[2:])  # the first two warm up


def time_queued(
    ours: Callable[[], object], theirs: Callable[[], object], repeats: int, calls: int = 4
) -> Pair:
    """Time one of ``calls`` calls that a GPU is given one behind the other, by its own clock."""

    def several(function: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(calls):
                function()

        return run

    pair = time_gpu_turns(several(ours), several(theirs), repeats)
    return dataclasses.replace(pair, ours_us=pair.ours_us / calls, theirs_us=pair.theirs_us / calls)


def pair_of_turns(turns: list[tuple[float, float]]) -> Pair:
    """Medians and quartiles of (ours, theirs) in microseconds, one a turn."""
    ratios = sorted(first / second for first, second in turns)
    return Pair(
        ours_us=statistics.median(first for first, _ in turns),
        theirs_us=statistics.median(second for _, second in turns),
        ratio=statistics.median(ratios),
        ratio_low=ratios[len(ratios) // 4],
        ratio_high=ratios[(3 * len(ratios)) // 4],
        repeats=len(turns),
    )


def _captured(function: Callable[[], object]) -> torch.cuda.CUDAGraph:
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def _calls_that_fill(function: Callable[[], object]) -> int:
    function()
    return int(BATCH_S * 1e6 / max(_batch_us(function, 5), 0.1))


def _batch_us(function: Callable[[], object], calls: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(calls):
        function()
    return (time.perf_counter_ns() - start) / calls / 1000
