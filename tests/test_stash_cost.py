"""What a batch costs the host, counted: launches, events, waits, and operations of torch.

A step of some layers is compared with one of eight more, each of which has one batch: what is
counted more is what eight batches cost, whatever the first and the last ones are like.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from backstash import kernels
from backstash.bench.stash_step import Load, Shape, Step
from backstash.kernels import MOST_RELEASED
from backstash.kernels.reference import activation, paged_rows
from backstash.stash import PagePool, Stash
from backstash.stash.streams import OneLane

MORE = MOST_RELEASED
LAUNCHES = ("claim_slabs", "stash_pages", "restore_pages", "release_pages", "finish_moves")
IN_SLABS = ("permute_into_slabs", "grouped_mm_in_slabs", "activate_slabs")
PLAIN = ("permute", "grouped_mm", "activate")


class Counting(OneLane):
    """Lanes of a GPU that count what they are asked for."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def here(self) -> str:
        return "here"

    def outward(self, after: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        return self._behind(after, "out")

    def inward(self, after: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        return self._behind(after, "in")

    def _behind(self, after: Sequence[Any], lane: str) -> contextlib.AbstractContextManager[None]:
        self.counts["changes of stream"] += 1
        for event in after:
            self.wait(event, lane)
        return super().outward(after)

    def event(self, stream: str | None = None) -> object:
        self.counts["events"] += 1
        return object()

    def wait(self, event: Any, stream: Any) -> None:
        self.counts["waits"] += event != stream
        # Torch waits for another stream by an event there.
        self.counts["events"] += isinstance(event, str) and event != stream


class Operations(TorchDispatchMode):
    """Counts the operations of torch, but for those that stand for a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.is_counting = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_counting:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before, self.is_counting = self.is_counting, False
        try:
            yield
        finally:
            self.is_counting = before


def costs(layers: int, monkeypatch: pytest.MonkeyPatch, *, stashing: bool) -> Counter[str]:
    """What a step costs that knows the order of the one before it."""
    load = Load(tokens=64, experts=8, top_k=2, ranks=2)
    shape = Shape(layers=layers, load=load, hidden=32, ffn=16, dtype=torch.float32)
    step = Step(shape, 2.0, "balanced", torch.device("cpu"))
    stash = Stash(PagePool(1 << 22, device="cpu", page_bytes=256)) if stashing else None
    for _ in range(3):
        step.run(stash)
    lanes, operations = Counting(), Operations()
    if stash is not None:
        stash.pool.streams = lanes

    def counting(module: Any, name: str) -> None:
        kernel = getattr(module, name)

        def counted(*args: Any, **key: Any) -> Any:
            lanes.counts[name] += 1
            with operations.paused():
                return kernel(*args, **key)

        patch.setattr(module, name, counted)

    with monkeypatch.context() as patch:
        for name in (*LAUNCHES, *IN_SLABS, *PLAIN):
            counting(kernels, name)
        for module in (paged_rows, activation):
            counting(module, "page_values")
        with operations:
            step.run(stash)
    return lanes.counts + operations.counts


def of_eight_more(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What eight layers more cost with a stash, less what they cost without."""
    more: Counter[str] = Counter()
    for layers, sign in ((6 + MORE, 1), (6, -1)):
        for stashing in (True, False):
            found = costs(layers, monkeypatch, stashing=stashing)
            for name, count in found.items():
                more[name] += count * sign * (1 if stashing else -1)
    return {name: count for name, count in more.items() if count}


def test_layers_that_compute_in_pages_cost_a_launch_each(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = 2  # input and pre-activation
    assert of_eight_more(monkeypatch) == {
        # One claims slabs, in which all else computes, and one gives all of them back.
        "claim_slabs": MORE,
        **dict.fromkeys(IN_SLABS, MORE),
        **dict.fromkeys(PLAIN, -MORE),
        "release_pages": 1,
        "page_values": buffers * MORE,
        # The lane waits for the ends of the groups, and what computes waits for the lane.
        "events": 2 * MORE + 1,
        "waits": 2 * MORE + 1,
        "changes of stream": MORE + 1,
        # A table with room for how far groups are shifted, and where in it the two are.
        "aten.slice.Tensor": 3 * MORE,
        "aten.view.dtype": MORE,
        # The table, what stands for each tensor that is saved, and for each that is read.
        "aten.empty.memory_format": (1 + 2 * buffers) * MORE,
        # The routing weights stay where they are, without their graph.
        "aten.detach.default": MORE,
    }


def test_eight_layers_more_cost_as_many_calls_as_eight_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Stash, "claim", lambda *_: None)
    buffers = 3  # input, pre-activation and routing weights
    assert of_eight_more(monkeypatch) == {
        # One copies them, one makes what matmuls have left, and one gives all of them back.
        "stash_pages": MORE,
        "finish_moves": MORE,
        "release_pages": 1,
        "page_values": buffers * MORE,
        # All is there, and all is copied; the lane waits for the first, a matmul for the second.
        "events": 2 * MORE + 1,
        "waits": 2 * MORE + 1,
        "changes of stream": MORE + 1,
        # The original as bytes, and pages as words; three of what is detached are torch's own.
        "aten.detach.default": (buffers + 3) * MORE,
        "aten.view.default": buffers * MORE,
        "aten.view.dtype": (buffers + 1) * MORE,
        # A table, a list of moves, and what stands for a tensor that is read in its pages.
        "aten.empty.memory_format": (2 + buffers) * MORE,
    }
