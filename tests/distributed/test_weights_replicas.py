"""Parameters that every rank keeps whole stay equal, and each gradient is reduced once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import nn

from backstash.weights.channel import Channel
from backstash.weights.replicas import Replicas

pytestmark = pytest.mark.distributed


def parameters() -> list[Any]:
    return [nn.Parameter(torch.zeros(shape)) for shape in ((2,), (3, 1), (1,))]


def reduced(group: Any, divisor: int) -> None:
    channel = Channel(group)
    a, b, unused = parameters()
    low = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    replicas = Replicas([a, b, unused, low, frozen], channel, divisor)
    a.grad = torch.full((2,), 0.5)
    earlier = a.grad
    for _ in range(2):
        replicas.set_aside()
        assert a.grad is None
        a.grad = torch.full((2,), channel.rank + 1.0)
        if channel.rank == 1:
            b.grad = torch.ones(3, 1)
            low.grad = torch.ones(2, dtype=torch.bfloat16)
        replicas.reduce()
    assert a.grad is earlier
    assert a.grad.tolist() == [0.5 + 2 * 3.0 / divisor] * 2
    assert b.grad.flatten().tolist() == [2.0 / divisor] * 3
    assert low.grad is not None
    assert low.grad.tolist() == [2.0 / divisor] * 2
    assert unused.grad is None
    assert frozen.grad is None


@pytest.mark.parametrize("divisor", [1, 2])
def test_what_this_pass_added_is_reduced_and_added_to_what_was_there(
    ranks: Ranks, divisor: int
) -> None:
    ranks.run(reduced, divisor)


def put_back(group: Any) -> None:
    a, b, _ = parameters()
    replicas = Replicas([a, b], Channel(group), 1)
    a.grad = torch.ones(2)
    replicas.set_aside()
    b.grad = torch.ones(3, 1)
    replicas.put_back()
    assert a.grad.tolist() == [1, 1]
    assert b.grad is not None
    replicas.put_back()
    assert a.grad.tolist() == [1, 1]


def test_after_a_failed_pass_the_gradients_are_as_autograd_left_them(ranks: Ranks) -> None:
    ranks.run(put_back, size=1)
