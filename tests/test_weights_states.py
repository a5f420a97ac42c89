"""A transition checks its state first."""

from __future__ import annotations

import itertools

import pytest

from backstash.errors import BackstashError
from backstash.weights.states import State, move


def test_a_transition_gives_the_state_after() -> None:
    assert move(State.GATHERING, State.GATHERING, State.GATHERED, "a gather") is State.GATHERED


@pytest.mark.parametrize(("now", "start"), list(itertools.permutations(State, 2)), ids=str)
def test_a_transition_from_another_state_raises(now: State, start: State) -> None:
    with pytest.raises(BackstashError, match=f"only while it is {start.value}"):
        move(now, start, State.SHARDED, "a gather")


def test_states_are_listed_by_how_much_memory_they_hold() -> None:
    assert list(State) == [State.SHARDED, State.REDUCING, State.GATHERING, State.GATHERED]
