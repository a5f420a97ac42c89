"""What of communication hides behind computation: the kernels of one step, from a profile.

A kernel of NCCL that runs beside another kernel costs nothing while the other one lasts.  What
is left, the time in which kernels of NCCL run and no others do, is *alone*: it makes the step
longer.  A kernel of NCCL also waits for the other ranks, so a late rank shows up here too.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

Span = tuple[float, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
    """Milliseconds in which kernels of NCCL run, and in which no others run beside them."""

    nccl_ms: float
    alone_ms: float


def profile_overlap(step: Callable[[], object]) -> Overlap:
    """Profile one step on a GPU; the step waits for the GPU before it returns."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        return overlap_of(json.loads(path.read_text())["traceEvents"])


def overlap_of(events: Sequence[Mapping[str, Any]]) -> Overlap:
    """Read the kernels of a trace; annotations and copies are none."""
    nccl: list[Span] = []
    others: list[Span] = []
    for event in events:
        if event.get("cat") == "kernel":
            spans = nccl if "nccl" in event["name"].lower() else others
            spans.append((event["ts"], event["ts"] + event["dur"]))
    alone_us = covered(nccl + others) - covered(others)
    return Overlap(nccl_ms=covered(nccl) / 1000, alone_ms=alone_us / 1000)


def covered(spans: Sequence[Span]) -> float:
    """The length of the union of spans of time."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
