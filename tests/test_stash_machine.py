"""Random programs of stash, restore and drop, against a model that only knows what it was given."""

from __future__ import annotations

import gc
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, multiple, rule
from torch import Tensor

import backstash as bs
from backstash.stash import Policy, Stash
from stash_cases import assert_nothing_is_held, pool

PAGE = 32


class Given:
    """What was saved: the bytes that must come back, and the handle, None if it was declined."""

    def __init__(self, value: Tensor, rows: int, handle: Any) -> None:
        self.value = value
        self.expected = value[: max(0, rows)].clone()
        self.handle = handle

    def check(self, stash: Stash) -> None:
        if self.handle is not None:
            restored = stash.unpack(self.handle)
            assert torch.equal(restored[: len(self.expected)], self.expected)


class Stashing(RuleBasedStateMachine):
    """Nodes with one to twelve buffers come, are asked for in any order, and go."""

    values = Bundle("values")

    @initialize(
        pages=st.integers(0, 60),
        host_pages=st.integers(0, 60),
        policy=st.sampled_from(Policy),
        ahead=st.integers(0, 2),
    )
    def build(self, pages: int, host_pages: int, policy: Policy, ahead: int) -> None:
        memory = pool(pages, host_pages, page_bytes=PAGE)
        self.stash = Stash(memory, policy=policy, ahead=ahead)
        self.seed = 0
        self.free_at_most = pages + host_pages

    def buffer(self, capacity: int, width: int) -> Tensor:
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(0, 255, (capacity, width), dtype=torch.uint8, generator=generator)

    @rule(
        target=values,
        shapes=st.lists(
            st.tuples(st.integers(1, 40), st.sampled_from([1, 4, 7, 16, 33]), st.integers(0, 41)),
            min_size=1,
            max_size=12,
        ),
        announced=st.booleans(),
        saved=st.integers(0, 12),
    )
    def save(self, shapes: list[tuple[int, int, int]], announced: bool, saved: int) -> Any:
        tensors = [self.buffer(capacity, width) for capacity, width, _ in shapes]
        rows = [torch.tensor([count]) for _, _, count in shapes]
        for tensor, count in zip(tensors, rows, strict=True):
            bs.mark_grouped_tensor(tensor, count)
        if announced:
            self.stash.expect(tensors)
        # A node may not save all that it announced.
        given = [
            Given(tensor, shape[2], self.stash.pack(tensor, count))
            for tensor, count, shape in list(zip(tensors, rows, shapes, strict=True))[: saved + 1]
        ]
        return multiple(*given)

    @rule(target=values, value=values, count=st.integers(0, 41))
    def save_again(self, value: Given, count: int) -> Given:
        """Another node has the same buffer, with a valid length of its own."""
        rows = torch.tensor([count])
        bs.mark_grouped_tensor(value.value, rows)
        return Given(value.value, count, self.stash.pack(value.value, rows))

    @rule(value=values)
    def restore(self, value: Given) -> None:
        value.check(self.stash)

    @rule(value=consumes(values))
    def drop(self, value: Given) -> None:
        value.check(self.stash)
        value.handle = None

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
        gc.collect()
        assert_nothing_is_held(self.stash)


TestStashing = Stashing.TestCase
TestStashing.settings = settings(
    max_examples=15,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
