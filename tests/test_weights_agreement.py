"""Ranks that request different things do the same, and each is served in the end."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstash.errors import PeerError
from backstash.weights.agreement import Agreement, Kind, Pass, Request

WISHES = st.one_of(
    st.builds(
        Request,
        st.sampled_from([kind for kind in Kind if kind is not Kind.END]),
        st.sampled_from(Pass),
        st.integers(0, 100_000),
    ),
    st.builds(Request, st.just(Kind.END), st.sampled_from(Pass)),
)


class Others:
    """A channel on which the other ranks say what a test tells them to."""

    rank, size = 1, 3

    def __init__(self, *rounds: list[int]) -> None:
        self.rounds = list(rounds)
        self.heard: list[int] = []

    def agree(self, code: int) -> tuple[int, int]:
        return self.wait_for(*self.post(code))

    def post(self, code: int) -> tuple[Any, Any]:
        self.heard.append(code)
        return None, [code, *self.rounds.pop(0)]

    def wait_for(self, work: Any, codes: Any) -> tuple[int, int]:
        return min(codes), max(codes)


def among(*rounds: list[int]) -> tuple[Agreement, Others]:
    others = Others(*rounds)
    channel: Any = others
    return Agreement(channel), others


def gather(bundle: int, during: Pass = Pass.FORWARD) -> Request:
    return Request(Kind.GATHER_ROWS, during, bundle)


@given(WISHES)
def test_a_request_is_a_number_and_comes_back_from_it(request: Request) -> None:
    assert Request.from_code(request.code) == request
    assert request.code >= 0


@given(WISHES, WISHES)
def test_different_requests_have_different_numbers(one: Request, other: Request) -> None:
    assert (one == other) == (one.code == other.code)


def test_requests_are_due_in_the_order_of_a_step() -> None:
    step = [
        gather(0),
        gather(1),
        Request(Kind.END, Pass.FORWARD),
        Request(Kind.GATHER_COLUMNS, Pass.BACKWARD, 1),
        Request(Kind.REDUCE, Pass.BACKWARD, 1),
        gather(0, Pass.BACKWARD),
        Request(Kind.REDUCE, Pass.BACKWARD, 0),
        Request(Kind.END, Pass.BACKWARD),
    ]
    assert all(a.code < b.code for a, b in itertools.pairwise(step))


def test_all_ranks_do_what_is_due_first() -> None:
    agreement, _ = among([gather(2).code, gather(4).code])
    assert agreement.settle(gather(3)) == gather(2)


def test_the_end_of_a_pass_comes_when_all_ranks_request_it() -> None:
    end = Request(Kind.END, Pass.BACKWARD)
    agreement, _ = among([gather(0).code, end.code], [end.code, end.code])
    assert agreement.settle(end) == gather(0)
    assert agreement.settle(end) == end


def test_an_end_that_another_rank_will_not_come_to_raises() -> None:
    end = Request(Kind.END, Pass.FORWARD)
    elsewhere = gather(0, Pass.BACKWARD)
    for mine, other in ((end, elsewhere), (elsewhere, end)):
        agreement, _ = among([other.code, other.code])
        with pytest.raises(PeerError, match="as many forward and backward passes"):
            agreement.settle(mine)


def test_the_failure_of_a_rank_is_heard_before_any_request() -> None:
    agreement, _ = among([-3, gather(0).code])
    with pytest.raises(PeerError, match="rank 2 of this group raised"):
        agreement.settle(gather(0))


def test_a_rank_that_fails_says_so_once_and_can_go_on() -> None:
    agreement, others = among([gather(0).code] * 2, [gather(5).code] * 2)
    agreement.announce_failure()
    agreement.announce_failure()
    assert others.heard == [-2]
    assert agreement.settle(gather(5)) == gather(5)


def test_one_rank_alone_agrees_with_itself() -> None:
    agreement, others = among()
    others.size = 1
    assert agreement.settle(gather(7)) == gather(7)
    agreement.announce_failure()
    assert others.heard == []
