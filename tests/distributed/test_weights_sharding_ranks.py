"""Ranks that do not do the same join each other's collectives, and none waits for ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks
from twins import SGD, H, Stack, assert_close, gradients_of, nothing_is_lent, stack_step

from backstash.errors import PeerError
from backstash.nn import GroupedLinear
from backstash.weights import State, shard_weights, sharded_weights

pytestmark = pytest.mark.distributed


def skipping(group: Any, orders: list[list[int]]) -> None:
    """Each rank goes through the layers in an order of its own."""
    twin, model = Stack(4), Stack(4)
    sharding = shard_weights(model, group)
    rank, size = sharding.channel.rank, sharding.channel.size
    for number in range(3):
        twin.zero_grad()
        model.zero_grad()
        for other in range(size):
            stack_step(twin, number * size + other, orders[(other + number) % size])
        stack_step(model, number * size + rank, orders[(rank + number) % size])
        for name, p in twin.named_parameters():
            mine = gradients_of(model)[name]
            if p.grad is None:
                assert mine is None, name
                continue
            assert mine is not None, name
            weight = sharded_weights(model).get(name)
            wanted = p.grad if weight is None else weight.cut.shard(p.grad, rank)
            torch.testing.assert_close(mine, wanted / size)
    assert nothing_is_lent(sharding)


ORDERS = {
    "one skips a layer": [[0, 1, 2, 3], [0, 2, 3]],
    "one skips the first and one the last": [[1, 2, 3], [0, 1, 2]],
    "nobody uses the last": [[0, 1], [0, 1, 2]],
    "other way round": [[0, 1, 2, 3], [3, 2, 1, 0]],
    "twice here, once there": [[0, 1, 1, 0], [0, 1]],
    "three of a kind": [[0], [1, 3], [2, 0, 2]],
}


@pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS.keys())
def test_ranks_that_use_other_layers_get_the_gradients_of_all(
    ranks: Ranks, orders: list[list[int]]
) -> None:
    ranks.run(skipping, orders, size=len(orders))


def no_tokens(group: Any) -> None:
    torch.manual_seed(1)
    model = GroupedLinear(3, H, H)
    sharding = shard_weights(model, group)
    rank = sharding.channel.rank
    rows = [4, 0][rank]
    x = torch.randn(rows, H, requires_grad=True)
    model(x, [0, rows, 0]).sum().backward()
    weight = sharded_weights(model)["weight"]
    assert weight.grad is not None
    start = weight.cut.cuts[rank]
    for row, values in enumerate(weight.grad.view(-1, H)):
        assert values.any() == ((start + row) // H == 1)


def test_a_rank_without_tokens_joins_every_collective(ranks: Ranks) -> None:
    ranks.run(no_tokens)


def no_backward(group: Any) -> None:
    model = Stack(2)
    sharding = shard_weights(model, group)
    if sharding.channel.rank == 0:
        stack_step(model, 0)
    else:
        with torch.no_grad():
            model(torch.randn(2, H))
        sharding.join()
    assert all(grad is not None and grad.any() for grad in gradients_of(model).values())


def test_a_rank_without_a_backward_joins_that_of_the_others(ranks: Ranks) -> None:
    ranks.run(no_backward)


class _Fault(Exception):
    pass


def _faulty(*_: Any) -> Any:
    raise _Fault


def raising(group: Any, place: str) -> None:
    """One rank raises in the first step; all go on with the second, together."""
    twin, model = Stack(3), Stack(3)
    sharding = shard_weights(model, group)
    rank = sharding.channel.rank
    stack_step(model, 0)
    model.zero_grad()
    layer: Any = model.layers[1]
    if rank == 1 and place == "forward":
        hook = layer.register_forward_hook(_faulty)
    elif rank == 1:
        hook = layer.register_full_backward_hook(_faulty)
    else:
        hook = None
    # No rank may finish the step, and each knows which one broke it.
    broken = pytest.raises(_Fault) if rank == 1 else pytest.raises(PeerError, match="rank 1 of")
    with broken:
        stack_step(model, 0)
    if hook is not None:
        hook.remove()
    model.zero_grad()
    optimizers = [SGD(m.parameters()) for m in (twin, model)]
    for m in (twin, model):
        stack_step(m, 7)
    for optimizer in optimizers:
        optimizer.step()
    assert_close(twin, model)
    assert nothing_is_lent(sharding)
    assert all(w.state is State.SHARDED for w in sharded_weights(model).values())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_when_one_rank_raises_all_do_and_all_can_go_on(ranks: Ranks, place: str, size: int) -> None:
    ranks.run(raising, place, size=size)


def other_program(group: Any) -> None:
    model = Stack(2)
    sharding = shard_weights(model, group)
    here = sharding.channel.rank == 0
    passes = (lambda: stack_step(model, 0)) if here else (lambda: forward_twice(model))
    with pytest.raises(PeerError, match="as many forward and backward passes"):
        passes()


def forward_twice(model: Stack) -> None:
    for _ in range(2):
        model(torch.randn(2, H))


def test_ranks_that_run_other_passes_are_told_so(ranks: Ranks) -> None:
    ranks.run(other_program)
