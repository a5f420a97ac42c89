"""Gradients on their way are few, and each is delivered once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks
from twins import Stack

from backstash.weights import State, shard_weights, sharded_weights
from backstash.weights.arrivals import Arrivals

pytestmark = pytest.mark.distributed


def delivering(group: Any) -> None:
    model = Stack(3)
    sharding = shard_weights(model, group)
    weights = list(sharded_weights(model).values())
    arrivals = Arrivals(divisor=2, running=1)
    ones = torch.ones(weights[0].cut.shape)
    for weight in weights:
        arrivals.expect([(weight.bundle, weight.bundle.reduce([ones], None), None)])
    assert [weight.state for weight in weights] == [State.SHARDED, State.SHARDED, State.REDUCING]
    arrivals.finish()
    for weight in weights:
        assert weight.state is State.SHARDED
        assert weight.grad is not None
        assert torch.equal(weight.grad, torch.ones(weight.shape))
    assert sharding.channel.collectives == 3


def test_at_most_so_many_are_on_their_way(ranks: Ranks) -> None:
    ranks.run(delivering)


def doubting(group: Any) -> None:
    model = Stack(2)
    shard_weights(model, group)
    first, second = sharded_weights(model).values()
    arrivals = Arrivals(divisor=1, running=1)
    for place, weight in enumerate((first, second)):
        arrivals.expect([(weight.bundle, weight.bundle.reduce(None, None), place)])
    arrivals.finish()
    assert arrivals.doubts() == {0, 1}
    assert first.grad is None
    arrivals.settle(lambda place: place == 1)
    assert first.grad is None
    assert second.grad is not None
    assert not second.grad.any()
    assert arrivals.doubts() == set()


def test_what_is_doubtful_is_delivered_when_it_is_known_to_be_used(ranks: Ranks) -> None:
    ranks.run(doubting)


def taking(group: Any) -> None:
    model = Stack(1)
    shard_weights(model, group)
    (weight,) = sharded_weights(model).values()
    arrivals = Arrivals(divisor=2, running=1)
    grads = [torch.full(weight.cut.shape, 3.0)]
    arrivals.expect([(weight.bundle, weight.bundle.reduce(grads, None), None)])
    (share,) = arrivals.take_last()
    assert torch.equal(share, torch.full(weight.shape, 3.0))
    arrivals.expect([(weight.bundle, weight.bundle.reduce(grads, None), None)])
    arrivals.abandon(waits=True)
    arrivals.finish()
    assert weight.grad is None


def test_the_last_one_can_be_waited_for_and_all_can_be_forgotten(ranks: Ranks) -> None:
    ranks.run(taking)
