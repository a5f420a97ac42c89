"""Random programs of stash, restore and drop, against a model that only knows what it was given."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    multiple,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

import backstash as bs
from backstash import kernels
from backstash.kernels import InPages
from backstash.kernels.reference.slabs import write_slabs
from backstash.stash import Policy, Stash
from stash_cases import assert_nothing_is_held, pool

PAGE = 32
MOST = 12

#: Capacity, width and valid rows of each buffer of a node.
Shapes = list[tuple[int, int, int]]
SHAPES = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from([1, 4, 7, 16, 33]), st.integers(0, 41)),
    min_size=1,
    max_size=MOST,
)


class Given:
    """What was saved: the bytes that must come back, and the handle, None if it was declined."""

    def __init__(self, value: Tensor, rows: int, handle: Any) -> None:
        self.value = value
        self.expected = value[: max(0, rows)].clone()
        self.handle = handle

    def check(self, stash: Stash) -> None:
        if self.handle is not None:
            self.compare(stash.unpack(self.handle))

    def compare(self, restored: Tensor) -> None:
        assert torch.equal(restored[: len(self.expected)], self.expected)


class Stashing(RuleBasedStateMachine):
    """Nodes with one to twelve buffers come, are asked for in any order, and go in any."""

    values = Bundle("values")
    page_bytes = PAGE

    @initialize(
        pages=st.integers(0, 60) | st.integers(100, 1000),
        host_pages=st.integers(0, 60) | st.integers(100, 1000),
        policy=st.sampled_from(Policy),
        ahead=st.integers(0, 2),
    )
    def build(self, pages: int, host_pages: int, policy: Policy, ahead: int) -> None:
        memory = pool(pages, host_pages, page_bytes=self.page_bytes)
        self.stash = Stash(memory, policy=policy, ahead=ahead)
        self.given: list[Given] = []
        self.seed = 0
        self.free_at_most = pages + host_pages

    def buffers(self, shapes: Shapes) -> list[tuple[Tensor, Tensor]]:
        """Marked buffers of bytes, each with the number of its valid rows."""
        new = []
        for capacity, width, count in shapes:
            self.seed += 1
            generator = torch.Generator().manual_seed(self.seed)
            tensor = torch.randint(
                0, 255, (capacity, width), dtype=torch.uint8, generator=generator
            )
            new.append((tensor, torch.tensor([count])))
            bs.mark_grouped_tensor(*new[-1])
        return new

    def save(self, buffers: list[tuple[Tensor, Tensor]], shapes: Shapes) -> Any:
        """What a node saves of its buffers, one after the other."""
        given = [
            Given(tensor, count, self.stash.pack(tensor, rows))
            for (tensor, rows), (_, _, count) in zip(buffers, shapes, strict=False)
        ]
        self.given += given
        return multiple(*given)

    @rule(target=values, shapes=SHAPES)
    def save_alone(self, shapes: Shapes) -> Any:
        """A node that announces nothing: each buffer is a batch of its own."""
        return self.save(self.buffers(shapes), shapes)

    @rule(target=values, shapes=SHAPES, saved=st.integers(1, MOST))
    def save_together(self, shapes: Shapes, saved: int) -> Any:
        """A node may not save all that it announced."""
        buffers = self.buffers(shapes)
        self.stash.expect([tensor for tensor, _ in buffers])
        return self.save(buffers[:saved], shapes)

    @rule(target=values, shapes=SHAPES)
    def multiply_and_save(self, shapes: Shapes) -> Any:
        """Such buffers may stay where they are, or leave with the next matmuls."""
        buffers = self.buffers(shapes)
        self.stash.multiply()
        self.stash.expect([tensor for tensor, _ in buffers])
        return self.save(buffers, shapes)

    @rule(target=values, value=values, count=st.integers(0, 41))
    def save_again(self, value: Given, count: int) -> Given:
        """Another node has the same buffer, with a valid length of its own."""
        rows = torch.tensor([count])
        bs.mark_grouped_tensor(value.value, rows)
        self.given.append(Given(value.value, count, self.stash.pack(value.value, rows)))
        return self.given[-1]

    @rule(value=values)
    def restore(self, value: Given) -> None:
        value.check(self.stash)

    @rule(value=values, is_last=st.booleans())
    def read_in_place(self, value: Given, is_last: bool) -> None:
        """Pages that are read stay as long as they are, even if autograd has let go of them."""
        if value.handle is not None:
            rows = self.stash.read(value.handle, lambda paged: True)
            if is_last:
                value.handle = None
            value.compare(kernels.page_values(rows) if isinstance(rows, InPages) else rows)

    @rule(value=consumes(values))
    def drop(self, value: Given) -> None:
        value.check(self.stash)
        value.handle = None

    @rule(all_of_it=st.booleans())
    def run_backward(self, all_of_it: bool) -> None:
        """The newest is asked for first, and goes; the next round begins when all have gone."""
        while self.given and (all_of_it or len(self.given) > 4):
            last = self.given.pop()
            last.check(self.stash)
            last.handle = None

    @rule(tensor=st.integers(0, 3))
    def offer_something_else(self, tensor: int) -> None:
        assert self.stash.pack(torch.ones(tensor, 4), None) is None

    @rule()
    def settle(self) -> None:
        self.stash.settle()

    @rule()
    def look(self) -> None:
        statistics = self.stash.stats()
        assert statistics.overflows == 0
        used = statistics.device_used + statistics.host_used
        assert 0 <= used <= self.stash.pool.memory.ledger.bound <= self.free_at_most

    def teardown(self) -> None:
        if not hasattr(self, "stash"):
            return
        for name in self.bundles.get("values", []):
            self.names_to_values[name.name].check(self.stash)
            self.names_to_values[name.name].handle = None
        self.stash.settle()
        assert_nothing_is_held(self.stash)


class Computing(Stashing):
    """Nodes may compute in pages, of one column of 64 rows each, what they save."""

    values = Stashing.values
    page_bytes = 128

    @rule(
        target=values,
        counts=st.lists(st.integers(0, 150), min_size=1, max_size=4),
        columns=st.lists(st.integers(1, 3), min_size=1, max_size=3),
        is_saved=st.booleans(),
    )
    def compute_in_pages(self, counts: list[int], columns: list[int], is_saved: bool) -> Any:
        """What a node claims it may never save."""
        valid, ends = sum(counts), torch.tensor(counts).cumsum(0).int()
        like = torch.empty(0, dtype=torch.float16)
        places = self.stash.claim(like, columns, valid + 3, ends) or []
        given = []
        for place in places:
            value = torch.randn(place.slabs.shape).half()
            write_slabs(value, place.slabs)
            given.append((value, place.stand_in))
        if not is_saved:
            return multiple()
        self.stash.expect([stand_in for _, stand_in in given])
        new = [Given(value, valid, self.stash.pack(one, None)) for value, one in given]
        self.given += new
        return multiple(*new)


FEW = settings(
    max_examples=15,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestStashing = Stashing.TestCase
TestStashing.settings = FEW
TestComputing = Computing.TestCase
TestComputing.settings = FEW


@pytest.fixture
def young_memory() -> Iterator[None]:
    """Every program ends in a collection, which need not look at what was there before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.usefixtures("young_memory")
@pytest.mark.parametrize("first", range(20))
@pytest.mark.parametrize("programs", [Stashing, Computing])
def test_ten_thousand_programs(programs: type[Stashing], first: int) -> None:
    """The same ones every time: 500 from each of twenty seeds."""
    many = settings(FEW, max_examples=500, database=None, print_blob=True)
    run_state_machine_as_test(seed(first)(programs), settings=many)
