"""A sharded model trains as the whole one does, whatever the ranks do."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch.utils.checkpoint import checkpoint
from twins import (
    ADAM,
    SGD,
    H,
    Stack,
    assert_close,
    case_step,
    differing,
    gradients_of,
    nothing_is_lent,
    stack_step,
    train_twins,
)

from backstash.errors import PeerError
from backstash.nn import GroupedLinear
from backstash.recipes import recipe as named_recipe
from backstash.weights import ShardOptions, State, shard_weights, sharded_weights
from nn_cases import CASE_NAMES, CASES, RECIPES

pytestmark = pytest.mark.distributed


def layer_parity(group: Any, name: str, name_of_recipe: str) -> list[str]:
    case = next(case for case in CASES if case.name == name)
    twin, model = case.make(), case.make()
    learns_scales = name_of_recipe == "float8_delayed"
    # So does random rounding: it draws from a generator of the process.
    options = {"stochastic_rounding": False} if name_of_recipe == "nvfp4" else {}
    recipe = named_recipe(name_of_recipe, **options)
    sharding = shard_weights(model, group, gather="high_precision" if learns_scales else recipe)
    # Learnt scales are those of a process, so there both ranks see what the twin sees.
    train_twins(twin, model, case_step(case, recipe), ADAM, same_data=learns_scales)
    assert nothing_is_lent(sharding)
    assert sharding.surprises == 0
    return differing(twin, model)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", CASE_NAMES)
def test_five_steps_on_two_ranks_are_those_of_the_whole_layer_bit_for_bit(
    ranks: Ranks, name: str, recipe: str
) -> None:
    assert ranks.run(layer_parity, name, recipe) == [[], []]


def close_parity(group: Any, options: ShardOptions | None) -> None:
    for name in CASE_NAMES:
        case = next(case for case in CASES if case.name == name)
        twin, model = case.make(), case.make()
        shard_weights(model, group, options=options)
        train_twins(twin, model, case_step(case, "high_precision"), SGD)
        assert_close(twin, model)


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize(
    "options",
    [None, ShardOptions(accumulate=torch.float32, delivery="at_once", split="rows")],
    ids=["as it is", "wide, at once, by rows"],
)
def test_five_steps_on_more_ranks_differ_only_by_the_order_of_additions(
    ranks: Ranks, size: int, options: ShardOptions | None
) -> None:
    ranks.run(close_parity, options, size=size)


def one_rank(group: Any) -> list[str]:
    twin, model = Stack(), Stack()
    sharding = shard_weights(model, group, gather="mxfp8")
    train_twins(twin, model, stack_step, ADAM)
    assert sharding.wire_bytes == 0
    return []


def test_a_group_of_one_sends_nothing(ranks: Ranks) -> None:
    ranks.run(one_rank, size=1)


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


def prefetching(group: Any, prefetch: int) -> list[int]:
    model = Stack(5)
    sharding = shard_weights(model, group, prefetch=prefetch)
    whole = sharding.bundles[0].whole_bytes
    peaks = []
    for number in range(6):
        sharding.channel.leases.reset_peak()
        stack_step(model, number)
        peaks.append(sharding.channel.leases.peak_bytes // whole)
        assert nothing_is_lent(sharding)
    assert sharding.surprises == 0
    # gloo's thread may hold a buffer a moment longer than the collective takes, so a single
    # pass can show one more; the first pass knows no order yet.
    return [min(peaks[1:]), max(peaks)]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_at_most_the_weight_in_use_and_those_ahead_of_it_are_in_memory(
    ranks: Ranks, prefetch: int
) -> None:
    for steady, most in ranks.run(prefetching, prefetch):
        assert steady == 1 + prefetch
        assert most <= 2 + prefetch


def surprising(group: Any) -> None:
    model = Stack(4)
    sharding = shard_weights(model, group, prefetch=2)
    for number, order in enumerate([[0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 1, 3], [3, 3]]):
        twin = Stack(4)
        model.zero_grad()
        stack_step(twin, number, order)
        stack_step(model, number, order)
        for name, weight in sharded_weights(model).items():
            grad = twin.get_parameter(name).grad
            assert (grad is None) == (weight.grad is None)
            if grad is not None and weight.grad is not None:
                wanted = weight.cut.shard(grad, sharding.channel.rank)
                torch.testing.assert_close(weight.grad, wanted)
        expected_so_far = number < 2
        assert (sharding.surprises == 0) == expected_so_far
        assert nothing_is_lent(sharding)


def test_a_surprise_is_counted_and_gathers_on_demand(ranks: Ranks) -> None:
    ranks.run(surprising)


def recomputing(group: Any, *, use_reentrant: bool) -> None:
    results = []
    for way in (checkpoint, None):
        model = Stack(3)
        sharding = shard_weights(model, group)
        for number in range(2):
            model.zero_grad()
            torch.manual_seed(number)
            x = torch.randn(5, H, requires_grad=True)
            h: Any = x
            for layer in model.layers:
                h = layer(h) if way is None else way(layer, h, use_reentrant=use_reentrant)
            h.sum().backward()
            assert nothing_is_lent(sharding)
            assert all(bundle.state is State.SHARDED for bundle in sharding.bundles)
        results.append([x.grad, *gradients_of(model).values()])
        assert sharding.surprises == 0
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_gathers_again_and_leaves_no_buffer(
    ranks: Ranks, *, use_reentrant: bool
) -> None:
    ranks.run(functools.partial(recomputing, use_reentrant=use_reentrant))


def tied(group: Any) -> list[str]:
    models = [Stack(3), Stack(3)]
    for m in models:
        m.layers[2].weight = m.layers[0].weight  # pyright: ignore
    twin, model = models
    shard_weights(model, group)
    assert model.layers[2].weight is model.layers[0].weight
    train_twins(twin, model, functools.partial(stack_step, order=[0, 1, 2, 1]), SGD)
    assert_close(twin, model)
    return list(sharded_weights(model))


def test_tied_weights_and_a_layer_applied_twice_train_as_they_do_whole(ranks: Ranks) -> None:
    assert ranks.run(tied)[0] == ["layers.0.weight", "layers.1.weight"]


def accumulating(group: Any, reduce: str) -> None:
    twin, model = Stack(2), Stack(2)
    sharding = shard_weights(model, group, options=ShardOptions(reduce=reduce))
    rank, size = sharding.channel.rank, sharding.channel.size
    for micro in range(3):
        for other in range(size):
            stack_step(twin, micro * size + other)
        stack_step(model, micro * size + rank)
    for name, p in twin.named_parameters():
        assert p.grad is not None
        weight = sharded_weights(model).get(name)
        wanted = p.grad if weight is None else weight.cut.shard(p.grad, rank)
        wanted = wanted / (size if reduce == "mean" else 1)
        torch.testing.assert_close(gradients_of(model)[name], wanted)


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_micro_batches_add_up_for_shards_and_for_the_rest(ranks: Ranks, reduce: str) -> None:
    ranks.run(accumulating, reduce, size=3)


def built_and_deleted(group: Any) -> list[int]:
    counts = []
    for number in range(4):
        model = Stack(3)
        sharding = shard_weights(model, group, prefetch=2)
        optimizer = ADAM(model.parameters())
        stack_step(model, number)
        optimizer.step()
        del model, sharding, optimizer
        gc.collect()
        counts.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
    return counts


def test_build_train_delete_build_leaves_nothing(ranks: Ranks) -> None:
    for counts in ranks.run(built_and_deleted):
        assert len(set(counts[1:])) == 1, counts
