"""Experts that are parameters of their own move in one collective, asked of their leader."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from twins import SGD, Stack, nothing_is_lent, stack_step

from backstash import save_for_backward, saved_values
from backstash.errors import ShapeError
from backstash.weights import (
    ShardedWeight,
    finalize_weight_grads,
    materialize_weight_for_backward,
    materialize_weight_for_forward,
    shard_weights,
)

pytestmark = pytest.mark.distributed

SIZES = [5, 3, 8, 1]


class _Experts(torch.autograd.Function):
    """Each weight of the list times its own row of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        save_for_backward(ctx, x, *weights)
        full = materialize_weight_for_forward(list(weights))
        return torch.cat([w @ row for w, row in zip(full, x, strict=True)])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, *weights = saved_values(ctx)
        full = materialize_weight_for_backward(weights)
        pieces = dy.split([len(w) for w in full])
        dx = torch.stack([d @ w for d, w in zip(pieces, full, strict=True)])
        grads = [torch.outer(d, row) for d, row in zip(pieces, x, strict=True)]
        return dx, *finalize_weight_grads(weights, grads)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.experts = nn.ParameterList(torch.randn(size, 4) for size in SIZES)
        self.offset = nn.Parameter(torch.randn(sum(SIZES)))

    def forward(self, x: Tensor) -> Tensor:
        return _Experts.apply(x, *self.experts) + self.offset


def run(model: nn.Module, batch: int) -> None:
    torch.manual_seed(batch)
    x = torch.randn(len(SIZES), 4, requires_grad=True)
    model(x).square().sum().backward()


def coalesced(group: Any) -> None:
    twin, model = Experts(), Experts()
    sharding = shard_weights(model, group, filter=lambda name, p: "experts" in name)
    (bundle,) = sharding.bundles
    assert [member.name for member in bundle.members] == [f"experts.{g}" for g in range(4)]
    optimizers = [SGD(m.parameters()) for m in (twin, model)]
    rank, size = sharding.channel.rank, sharding.channel.size
    for number in range(3):
        for m in (twin, model):
            m.zero_grad()
        for other in range(size):
            run(twin, number * size + other)
        for p in twin.parameters():
            assert p.grad is not None
            p.grad /= size
        before = sharding.channel.agreements
        run(model, number * size + rank)
        # One gather, one more, one reduction and the two ends: not four of each.  What is known
        # from the first step is not agreed on again.
        assert sharding.channel.agreements - before == (5 if number == 0 else 2)
        for optimizer in optimizers:
            optimizer.step()
    for whole, mine in zip(twin.parameters(), model.parameters(), strict=True):
        wanted = mine.cut.shard(whole, rank) if isinstance(mine, ShardedWeight) else whole
        torch.testing.assert_close(mine.data, wanted.data)
    assert nothing_is_lent(sharding)


@pytest.mark.parametrize("size", [2, 4])
def test_a_list_of_experts_moves_in_one_collective_and_trains(ranks: Ranks, size: int) -> None:
    ranks.run(coalesced, size=size)


def wrong_gradients(group: Any) -> None:
    model = Experts()
    sharding = shard_weights(model, group, filter=lambda name, p: "experts" in name)
    (bundle,) = sharding.bundles
    with pytest.raises(ShapeError, match="needs as many gradients, got 1"):
        bundle.reduce([torch.zeros(5, 4)], None)
    with pytest.raises(ShapeError, match=r"experts.0 must have the shape of the whole weight"):
        bundle.reduce([torch.zeros(3, 4)] * 4, None)


def test_gradients_that_do_not_fit_the_group_are_refused(ranks: Ranks) -> None:
    ranks.run(wrong_gradients)


def questions(group: Any) -> list[int]:
    """How often ranks asked each other for magnitudes, in each of three steps."""
    model = Stack(3, 32)
    sharding = shard_weights(model, group, gather="float8_current")
    asked, largest = [], sharding.channel.largest

    def counting(x: Tensor) -> Tensor:
        asked[-1] += 1
        return largest(x)

    sharding.channel.largest = counting  # pyright: ignore[reportAttributeAccessIssue]
    for number in range(3):
        asked.append(0)
        stack_step(model, number)
    return asked


def test_magnitudes_of_a_known_step_are_asked_for_once(ranks: Ranks) -> None:
    # Three gathers in forward and two in backward (the first layer has no input gradient).
    assert ranks.run(questions) == [[5, 1, 1]] * 2
