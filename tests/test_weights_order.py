"""All ranks plan the same buckets from the uses of the last pass, and start them in time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backstash.weights.agreement import Kind, Pass, Request
from backstash.weights.order import Order

GATHER, REDUCE = Kind.GATHER_COLUMNS, Kind.REDUCE


def use(kind: Kind, bundle: int) -> Request:
    return Request(kind, Pass.BACKWARD, bundle)


def backward(layers: int) -> list[Request]:
    """Each layer gathers, and then reduces."""
    return [use(kind, i) for i in reversed(range(layers)) for kind in (GATHER, REDUCE)]


def one_byte(use: Request) -> tuple[int, str]:
    return 1, "alike"


def moved(order: Order) -> list[list[tuple[str, int]]]:
    """What each bucket carries."""
    uses = [[order.uses[i] for i in bucket] for bucket in order.buckets]
    return [[(u.kind.name[0].lower(), u.bundle) for u in bucket] for bucket in uses]


def test_without_prefetch_everything_starts_when_it_is_asked_for() -> None:
    order = Order.of(backward(2), 0, 0, one_byte)
    assert moved(order) == [[("g", 1)], [("r", 1)], [("g", 0)], [("r", 0)]]
    assert order.first == 0
    assert order.ready == order.ahead == (1, 2, 3, 4)


def test_gathers_run_ahead_of_the_reductions_before_them() -> None:
    order = Order.of(backward(3), 1, 0, one_byte)
    assert moved(order) == [[("g", 2)], [("g", 1)], [("r", 2)], [("g", 0)], [("r", 1)], [("r", 0)]]
    assert order.first == 1
    assert order.ready == (1, 3, 3, 5, 5, 6)
    assert order.ahead == (2, 3, 4, 5, 5, 6)


def test_small_uses_move_together_and_a_large_one_alone() -> None:
    sizes = {0: 1, 1: 1, 2: 9, 3: 2, 4: 1}
    uses = [use(GATHER, i) for i in range(5)] + [use(REDUCE, i) for i in range(5)]
    order = Order.of(uses, 1, 3, lambda use: (sizes[use.bundle], None))
    names = [[bundle for _, bundle in bucket] for bucket in moved(order)]
    assert names == [[0, 1], [2], [3, 4], [0, 1], [2], [3, 4]]


def test_what_is_not_alike_does_not_move_together() -> None:
    uses = [use(REDUCE, i) for i in range(4)]
    order = Order.of(uses, 1, 100, lambda use: (1, use.bundle < 2))
    assert [[bundle for _, bundle in bucket] for bucket in moved(order)] == [[0, 1], [2, 3]]


def test_a_pass_without_uses_has_no_buckets() -> None:
    assert Order.of([], 2, 0, one_byte).buckets == ()


USES = st.lists(st.builds(use, st.sampled_from([GATHER, REDUCE]), st.integers(0, 5)), max_size=20)


@given(USES, st.integers(0, 3), st.integers(0, 4))
def test_each_use_is_served_once_and_in_time(uses: list[Request], prefetch: int, most: int) -> None:
    order = Order.of(uses, prefetch, most, one_byte)
    assert sorted(i for bucket in order.buckets for i in bucket) == list(range(len(uses)))
    assert all(len(bucket) <= max(1, most) for bucket in order.buckets)
    started = order.first
    for i, now in enumerate(uses):
        assert started <= order.ready[i] <= order.ahead[i]
        started = order.ahead[i]
        if now.kind is GATHER:
            assert any(i in bucket for bucket in order.buckets[: order.ready[i]])
            open_gathers = [
                bucket
                for bucket in order.buckets[:started]
                if uses[bucket[0]].kind is GATHER and bucket[-1] > i
            ]
            # The bucket in use may carry more than this one.
            assert len(open_gathers) <= prefetch + 1
        else:
            # Nothing is sent before its gradient is there.
            assert all(
                max(bucket) <= i
                for bucket in order.buckets[:started]
                if uses[bucket[0]].kind is REDUCE
            )
    assert started == len(order.buckets)
