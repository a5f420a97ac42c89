"""A known order is followed without asking, and what is passed over is joined for the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from twins import Stack, gradients_of, nothing_is_lent, stack_step

from backstash import FLOAT8_CURRENT
from backstash.weights import (
    ShardOptions,
    materialize_weight_for_forward,
    shard_weights,
    sharded_weights,
)

pytestmark = pytest.mark.distributed


def counted(group: Any, orders: list[list[int]]) -> list[tuple[int, int]]:
    """Agreements and surprises in each step; every rank takes the layers in the same order."""
    model = Stack(4)
    sharding = shard_weights(model, group)
    counts = []
    for number, order in enumerate(orders):
        before = sharding.channel.agreements, sharding.surprises
        stack_step(model, number, order)
        now = sharding.channel.agreements, sharding.surprises
        counts.append((now[0] - before[0], now[1] - before[1]))
        assert nothing_is_lent(sharding)
    return counts


def test_only_the_ends_of_a_known_pass_are_agreed_on(ranks: Ranks) -> None:
    full = [0, 1, 2, 3]
    # Four gathers, three (the first layer has no input gradient) and four reductions; two ends.
    for counts in ranks.run(counted, [full] * 3, size=3):
        assert counts == [(13, 0), (2, 0), (2, 0)]


def test_an_order_that_was_not_followed_is_learnt_anew(ranks: Ranks) -> None:
    full, short = [0, 1, 2, 3], [0, 2, 3]
    for counts in ranks.run(counted, [full, short, short, short, full, full, full], size=2):
        agreed, surprises = zip(*counts, strict=True)
        # Three gathers, two and three reductions; two ends.  A skipped layer is a surprise in
        # each pass, and learning is none.
        assert agreed[0] == 13
        assert agreed[1:4] == (2, 10, 2)
        assert agreed[5:] == (13, 2)
        assert surprises[:4] == (0, 2, 0, 0)
        assert surprises[4] > 0
        assert surprises[5:] == (0, 0)


def unused(group: Any) -> None:
    """A layer that no rank uses has no gradient, though the order had it."""
    model = Stack(3)
    shard_weights(model, group)
    for number, order in enumerate([[0, 1, 2], [0, 2]]):
        model.zero_grad()
        stack_step(model, number, order)
        grads = gradients_of(model)
        assert [grads[f"layers.{i}.weight"] is not None for i in range(3)] == [
            i in order for i in range(3)
        ]


def test_a_weight_that_nobody_used_this_time_has_no_gradient(ranks: Ranks) -> None:
    ranks.run(unused)


def micro_batches(group: Any) -> list[int]:
    """Two forward passes and then two backward passes a step; each place has its own order."""
    model = Stack(2)
    sharding = shard_weights(model, group)
    agreed = []
    for _ in range(3):
        before = sharding.channel.agreements
        losses = [model(torch.randn(3, 12), order).sum() for order in ([0, 1], [1, 0, 1])]
        for loss in losses:
            loss.backward()
        agreed.append(sharding.channel.agreements - before)
        assert nothing_is_lent(sharding)
    assert sharding.surprises == 0
    return agreed


def test_passes_at_different_places_of_a_step_have_orders_of_their_own(ranks: Ranks) -> None:
    for agreed in ranks.run(micro_batches):
        assert agreed[1:] == [4, 4]


def not_begun(group: Any) -> None:
    """Layers that are called without the module that was sharded are agreed on each time."""
    model = Stack(2)
    sharding = shard_weights(model, group)
    for _ in range(3):
        before = sharding.channel.agreements
        x = torch.randn(2, 12, requires_grad=True)
        model.layers[1](model.layers[0](x)).sum().backward()
        assert sharding.channel.agreements - before == 2 + 2 + 2 + 1
    assert sharding.surprises == 0


def test_layers_called_by_themselves_are_served_as_they_come(ranks: Ranks) -> None:
    ranks.run(not_begun)


class Growing(nn.Module):
    """Changes a weight after its gather for this pass has started."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = (nn.Parameter(torch.randn(6, 8)) for _ in range(2))

    def forward(self, factor: float) -> Tensor:
        materialize_weight_for_forward(self.first)
        if factor != 1:
            self.second.mul_(factor)
        (whole,) = materialize_weight_for_forward(self.second)
        return whole.dequantize()


def changed_in_a_pass(group: Any) -> None:
    twin, model = Growing(), Growing()
    sharding = shard_weights(model, group, gather="float8_current", filter=lambda *_: True)
    with torch.no_grad():
        # Passes in a row are taken to be different ones at first, each with an order to learn.
        for factor in [1.0] * 6 + [8.0, 1.0]:
            whole = twin.second.mul_(factor)
            assert torch.equal(model(factor), FLOAT8_CURRENT.quantize(whole).dequantize())
    assert sharding.surprises == 1


def test_a_weight_that_changed_within_a_pass_is_gathered_with_its_new_scale(ranks: Ranks) -> None:
    ranks.run(changed_in_a_pass)


def waited_for(group: Any) -> None:
    """With gradients delivered at once none waits for the next one of its bucket."""
    model, other = Stack(3), Stack(3)
    options = [ShardOptions(delivery=delivery) for delivery in ("at_once", "overlapped")]
    shard_weights(model, group, options=options[0])
    shard_weights(other, group, options=options[1])
    for number in range(3):
        for m in (model, other):
            m.zero_grad()
            stack_step(m, number)
        for name, weight in sharded_weights(model).items():
            grad = sharded_weights(other)[name].grad
            assert weight.grad is not None
            assert grad is not None
            assert torch.equal(weight.grad, grad)


def test_gradients_delivered_at_once_are_those_delivered_late(ranks: Ranks) -> None:
    ranks.run(waited_for)
