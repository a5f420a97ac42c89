"""A launch knows what it left, and what still reads its pages."""

from __future__ import annotations

import pytest
import torch

from backstash.stash import Policy
from backstash.stash.launch import Buffer, Launch
from backstash.stash.pool import PagePool
from stash_cases import assert_nothing_is_held, pool


def launched(memory: PagePool, *, leaving: bool) -> Launch:
    buffer = Buffer(torch.arange(200, dtype=torch.uint8), torch.tensor([150]), 1)
    with memory.turn():
        account, _ = memory.admit(1, Policy.SPILL)
        return memory.stash([buffer], account, 0, leaving=leaving)


@pytest.mark.parametrize("leaving", [False, True], ids=["whole", "leaving"])
def test_a_launch_has_moves_where_it_was_told_to_leave_some(leaving: bool) -> None:
    memory = pool()
    launch = launched(memory, leaving=leaving)
    assert (launch.moves is not None) == leaving
    memory.drop(launch)
    assert_nothing_is_held(memory)


def test_pages_are_read_until_a_copy_back_and_its_moves_are_done() -> None:
    memory = pool()
    launch = launched(memory, leaving=False)
    target = torch.zeros(200, dtype=torch.uint8)
    with memory.turn():
        written, moves = memory.restore(launch, [target], [0], leaving=True)
        assert moves is not None
        memory.finish(launch, moves, memory.streams.here(), after=written)
    assert len(launch.reads) == 2
    assert torch.equal(target[:150], torch.arange(150, dtype=torch.uint8))
    assert not target[150:].any()
    memory.drop(launch)
    assert_nothing_is_held(memory)
