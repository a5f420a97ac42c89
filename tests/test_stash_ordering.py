"""On a GPU copies run beside compute; here it is proved that each waits for what it needs.

The lanes are simulated: every kernel runs at once, as on a CPU, but what it reads and writes is
noted with the lane it was launched in, and each lane knows how far it has waited for the others
(a vector clock).  Two accesses to the same bytes, one of them a write, must be ordered by such
waits; and memory may be given back to compute only behind everything that still uses it.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import backstash as bs
from backstash import kernels
from backstash.kernels.reference import activation, paged_rows
from backstash.kernels.reference.pages import TABLE_HEADER
from backstash.stash import PagePool, Policy, Stash
from backstash.stash.streams import OneLane
from stash_cases import BALANCED, PAGE, Copying, Experts, assert_nothing_is_held, scale, step

Clock = dict[str, int]


class Lanes(OneLane):
    """Three lanes, and who has waited for how much of whom."""

    def __init__(self) -> None:
        self.clocks: dict[str, Clock] = {name: {} for name in ("compute", "out", "in")}
        self.stack = ["compute"]
        self.seen: dict[Any, list[tuple[str, int, str]]] = {}
        self.broken: list[str] = []
        self.overlaps = 0

    def here(self) -> str:
        return self.stack[-1]

    def outward(self, after: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        return self._on("out", after)

    def inward(self, after: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        return self._on("in", after)

    @contextlib.contextmanager
    def _on(self, lane: str, after: Sequence[Any]) -> Iterator[None]:
        for event in after:
            self.wait(event, lane)
        self.stack.append(lane)
        try:
            yield
        finally:
            self.stack.pop()

    def on(self, stream: str) -> contextlib.AbstractContextManager[None]:
        return self._computing(stream)

    @contextlib.contextmanager
    def _computing(self, stream: str) -> Iterator[None]:
        self.stack.append(stream)
        try:
            yield
        finally:
            self.stack.pop()

    def event(self, stream: str | None = None) -> Clock:
        return dict(self.clocks[stream or self.here()])

    def wait(self, event: Clock | str, stream: str) -> None:
        clock = self.clocks[stream]
        for lane, count in (self.clocks[event] if isinstance(event, str) else event).items():
            clock[lane] = max(clock.get(lane, 0), count)

    def join(self) -> None:
        here = self.here()
        for lane in ("out", "in"):
            self.wait(self.clocks[here], lane)
            self.wait(self.clocks[lane], here)

    def touch(self, what: Any, how: str) -> None:
        """Note an access in the lane in force, and complain if it can meet another."""
        lane = self.here()
        clock = self.clocks[lane]
        clock[lane] = clock.get(lane, 0) + 1
        for other, count, other_how in self.seen.get(what, []):
            ordered = clock.get(other, 0) >= count
            if not ordered and "write" in (how, other_how):
                self.broken.append(f"{how} of {what} in {lane} meets {other_how} in {other}")
            self.overlaps += not ordered
        self.seen.setdefault(what, []).append((lane, clock[lane], how))

    def free(self, what: Any) -> None:
        """Memory goes back to compute, which may write to it at once."""
        for lane, count, how in self.seen.pop(what, []):
            if self.clocks["compute"].get(lane, 0) < count and lane != "compute":
                self.broken.append(f"{what} is freed under a {how} in {lane}")


class Traced:
    """A stash whose kernels tell the lanes what they touch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pages: int, **options: Any) -> None:
        self.pool = PagePool(pages * PAGE, 4096 * PAGE, device="cpu", page_bytes=PAGE)
        self.lanes = self.pool.streams = Lanes()
        self.stash = Stash(self.pool, **options)
        self.watched: set[int] = set()
        plain = {name: getattr(kernels, name) for name in ("stash_pages", "restore_pages")}
        release, finish = kernels.release_pages, kernels.finish_moves
        self.left: dict[int, Callable[[], None]] = {}
        self.carried, self.in_place = 0, 0

        def stash_pages(sources: list[Tensor], rows: list[Tensor], *rest: Any, **key: Any) -> None:
            plain["stash_pages"](sources, rows, *rest, **key)
            for tensor in rows:
                self.touch(tensor, "read")
            self.lanes.touch(("table", rest[1].data_ptr()), "write")
            self.make_or_leave(sources, "read", rest[1], len(sources), key["moves"])

        def restore_pages(targets: Any, places: Any, table: Tensor, *rest: Any, **key: Any) -> None:
            plain["restore_pages"](targets, places, table, *rest, **key)
            self.lanes.touch(("table", table.data_ptr()), "read")
            self.make_or_leave(targets, "write", table, key["buffers"], key["moves"])

        def release_pages(tables: list[Tensor], *rest: Any, **key: Any) -> None:
            # Given back, a page may be written by the next launch: that is what is checked.
            for table, buffers in zip(tables, key["buffers"], strict=True):
                self.touch_pages(table, buffers, "write")
                self.lanes.touch(("table", table.data_ptr()), "read")
            release(tables, *rest, **key)

        def finish_moves(moves: kernels.Moves) -> None:
            self.lanes.touch(("list", moves.list_N.data_ptr()), "read")
            self.left.pop(moves.list_N.data_ptr())()
            finish(moves)

        monkeypatch.setattr(kernels, "stash_pages", stash_pages)
        monkeypatch.setattr(kernels, "restore_pages", restore_pages)
        monkeypatch.setattr(kernels, "release_pages", release_pages)
        monkeypatch.setattr(kernels, "finish_moves", finish_moves)
        monkeypatch.setattr(self.stash, "multiply", self.multiply)
        values_of = paged_rows.page_values

        def page_values(paged: kernels.PagedRows) -> Tensor:
            """What an operation does that reads pages, in the lane in force."""
            self.touch_pages(paged.table, paged.buffers, "read")
            self.lanes.touch(("table", paged.table.data_ptr()), "read")
            self.in_place += 1
            return values_of(paged)

        for module in (paged_rows, activation):
            monkeypatch.setattr(module, "page_values", page_values)

    def make_or_leave(
        self, buffers: Any, how: str, table: Tensor, launched: int, moves: kernels.Moves | None
    ) -> None:
        """Copy in the lane in force, or leave it to matmuls and to whoever finishes."""
        names = [self.watch(tensor) for tensor in buffers]

        def make() -> None:
            for name in names:
                if name not in self.watched:
                    self.lanes.broken.append(f"{name} is gone before it was moved")
                self.lanes.touch(("memory", name), how)
            self.touch_pages(table, launched, "write" if how == "read" else "read")

        if moves is None:
            make()
        else:
            self.left[moves.list_N.data_ptr()] = make
            self.lanes.touch(("list", moves.list_N.data_ptr()), "write")

    def multiply(self) -> kernels.Moves | None:
        """A matmul that makes all moves that it is given; whoever finishes makes them again."""
        moves = Stash.multiply(self.stash)
        if moves is not None:
            self.carried += 1
            self.lanes.touch(("list", moves.list_N.data_ptr()), "read")
            self.left[moves.list_N.data_ptr()]()
        return moves

    def touch(self, tensor: Tensor, how: str) -> None:
        self.lanes.touch(("memory", self.watch(tensor)), how)

    def watch(self, tensor: Tensor) -> int:
        """The name of a tensor's memory, which is noticed to be freed from now on."""
        storage = tensor.untyped_storage()
        name = storage._cdata
        if name not in self.watched:
            self.watched.add(name)
            weakref.finalize(storage, self._gone, name)
        return name

    def _gone(self, name: int) -> None:
        self.watched.discard(name)
        self.lanes.free(("memory", name))

    def touch_pages(self, table: Tensor, buffers: int, how: str) -> None:
        count = int(table[0] + table[1])
        first = TABLE_HEADER + 2 * buffers
        for page in table[first : first + count].tolist():
            self.lanes.touch(("page", page), how)

    def read(self, handle: Any) -> Tensor:
        """What backward does: ask, and read on the stream that computes."""
        tensor = Stash.unpack(self.stash, handle)
        self.touch(tensor, "read")
        return tensor


@pytest.mark.parametrize("copies", [False, True], ids=["in place", "copied"])
@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("pages", [4096, 120])
@pytest.mark.parametrize("policy", Policy, ids=lambda policy: policy.value)
def test_every_access_of_a_step_is_ordered(
    policy: Policy, pages: int, ahead: int, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = Traced(monkeypatch, pages, policy=policy, ahead=ahead)
    monkeypatch.setattr(traced.stash, "unpack", traced.read)
    experts = Experts(4)
    parameters = list(experts.parameters())
    for _ in range(2):
        step(experts, parameters, BALANCED, Copying(traced.stash) if copies else traced.stash)
    gc.collect()
    assert traced.lanes.broken == []
    assert traced.stash.stats().batches > 0
    assert traced.carried > 0
    assert (traced.in_place > 0) != copies
    assert traced.left == {}
    assert_nothing_is_held(traced.stash)


def test_abandoned_graphs_and_retained_ones_are_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced(monkeypatch, 400)
    monkeypatch.setattr(traced.stash, "unpack", traced.read)
    for turn in range(6):
        x = torch.randn(48, 32, requires_grad=True)
        with bs.saving(traced.stash):
            y = scale(scale(scale(x, 40), 30), 20)
        if turn % 2:
            y.sum().backward(retain_graph=turn % 3 == 0)
        del y
    gc.collect()
    assert traced.lanes.broken == []
    assert_nothing_is_held(traced.stash)


def test_copies_do_run_beside_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced(monkeypatch, 4096)
    with bs.saving(traced.stash):
        y = scale(torch.randn(48, 32, requires_grad=True), 40)
    compute, out = traced.lanes.clocks["compute"], traced.lanes.clocks["out"]
    assert compute.get("out", 0) < out["out"]
    traced.stash.settle()
    assert compute["out"] == out["out"]
    del y


@pytest.mark.parametrize("method", ["wait", "inward", "outward"])
def test_the_simulation_notices_a_wait_that_is_left_out(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = Traced(monkeypatch, 4096, ahead=1)
    monkeypatch.setattr(traced.stash, "unpack", traced.read)
    plain_wait = traced.lanes.wait

    def wait(event: Clock | str, stream: str) -> None:
        if stream != "compute":
            plain_wait(event, stream)

    @contextlib.contextmanager
    def lane(after: Sequence[Any]) -> Iterator[None]:
        traced.lanes.stack.append("in" if method == "inward" else "out")
        yield
        traced.lanes.stack.pop()

    monkeypatch.setattr(traced.lanes, method, wait if method == "wait" else lane)
    experts = Experts(4)
    for _ in range(2):
        step(experts, list(experts.parameters()), BALANCED, Copying(traced.stash))
    gc.collect()
    assert traced.lanes.broken != []
