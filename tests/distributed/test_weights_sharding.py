"""A sharded model trains as the whole one does, whatever the ranks do."""

from __future__ import annotations

import functools
import gc
import time
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch.multiprocessing.reductions import StorageWeakRef
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


def prefetching(group: Any, prefetch: int) -> list[int]:
    model = Stack(5)
    options = ShardOptions(together_bytes=0)
    sharding = shard_weights(model, group, prefetch=prefetch, options=options)
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


def moving_together(group: Any, weights: int) -> tuple[int, int]:
    """Whole weights in memory at most, and collectives in a step once its order is known."""
    model = Stack(6)
    whole = H * H * 4
    options = ShardOptions(together_bytes=weights * whole)
    sharding = shard_weights(model, group, prefetch=1, options=options)
    peaks, collectives = [], 0
    for number in range(4):
        sharding.channel.leases.reset_peak()
        before = sharding.channel.collectives
        stack_step(model, number)
        collectives = sharding.channel.collectives - before
        peaks.append(sharding.channel.leases.peak_bytes // whole)
        assert nothing_is_lent(sharding)
    assert sharding.surprises == 0
    return min(peaks[1:]), collectives


@pytest.mark.parametrize("weights", [1, 2, 3, 6])
def test_small_weights_move_together_in_one_collective(ranks: Ranks, weights: int) -> None:
    for peak, collectives in ranks.run(moving_together, weights):
        # Forward gathers six, backward five (the first layer's input needs no gradient) and
        # reduces six.
        assert collectives == sum(-(-moved // weights) for moved in (6, 5, 6))
        # Those in use and those ahead; gloo's thread may hold one a moment longer.
        assert peak <= 2 * weights + 1


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


def recomputing(group: Any, *, use_reentrant: bool, whole: bool) -> None:
    results = []
    for way in (checkpoint, None):
        model = Stack(3)
        sharding = shard_weights(model, group)
        for number in range(2):
            model.zero_grad()
            torch.manual_seed(number)
            x = torch.randn(5, H, requires_grad=True)
            h: Any = x
            for layer in [model] if whole else model.layers:
                h = layer(h) if way is None else way(layer, h, use_reentrant=use_reentrant)
            h.sum().backward()
            assert nothing_is_lent(sharding)
            assert all(bundle.state is State.SHARDED for bundle in sharding.bundles)
        results.append([x.grad, *gradients_of(model).values()])
        assert sharding.surprises == 0
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("whole", [False, True], ids=["layers", "the model"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_gathers_again_and_leaves_no_buffer(
    ranks: Ranks, *, use_reentrant: bool, whole: bool
) -> None:
    ranks.run(functools.partial(recomputing, use_reentrant=use_reentrant, whole=whole))


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


def again(group: Any) -> None:
    """A second backward of the same graph, and a third pass of another."""
    model = Stack(2)
    sharding = shard_weights(model, group)
    rank = sharding.channel.rank
    torch.manual_seed(rank)
    y = model(torch.randn(5, H)).sum()
    y.backward(retain_graph=True)
    first = {name: grad.clone() for name, grad in gradients_of(model).items() if grad is not None}
    y.backward()
    for name, grad in gradients_of(model).items():
        assert torch.equal(grad, 2 * first[name])  # pyright: ignore
    model.zero_grad()
    one, other = model(torch.randn(5, H)), model(torch.randn(5, H))
    (one.sum() + other.sum()).backward()
    assert nothing_is_lent(sharding)


def test_a_graph_may_be_run_twice_and_two_graphs_at_once(ranks: Ranks) -> None:
    ranks.run(again)


def whole_gradients(group: Any, prefetch: int) -> list[int]:
    """The most whole gradients that were in memory when another one was made, in two steps."""
    model = Stack(6)
    options = ShardOptions(together_bytes=0)
    sharding = shard_weights(model, group, prefetch=prefetch, options=options)
    storages: list[StorageWeakRef] = []
    most = 0
    for bundle in sharding.bundles:
        prepare = bundle.prepare_reduction

        def watched(grads: Any, wide: Any, prepare: Any = prepare) -> Any:
            nonlocal most
            storages.append(StorageWeakRef(grads[0].untyped_storage()))
            most = max(most, sum(not storage.expired() for storage in storages))
            return prepare(grads, wide)

        bundle.prepare_reduction = watched  # pyright: ignore[reportAttributeAccessIssue]
    counts = []
    for number in range(2):
        most = 0
        stack_step(model, number)
        counts.append(most)
    return counts


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_few_whole_gradients_are_on_their_way_while_the_next_is_made(
    ranks: Ranks, prefetch: int
) -> None:
    running = max(1, prefetch)
    for counts in ranks.run(whole_gradients, prefetch):
        # gloo's thread may hold one a moment longer.
        assert all(running + 1 <= most <= running + 2 for most in counts)


def built_and_deleted(group: Any) -> list[int]:
    counts = []
    for number in range(4):
        model = Stack(3)
        sharding = shard_weights(model, group, prefetch=2)
        optimizer = ADAM(model.parameters())
        stack_step(model, number)
        optimizer.step()
        del model, sharding, optimizer
        counts.append(living_tensors(at_most=counts[0] if counts else 0))
    return counts


def living_tensors(*, at_most: int) -> int:
    """The tensors that stay; gloo's thread may hold one for a moment, but not for seconds."""
    deadline = time.monotonic() + 5
    while True:
        gc.collect()
        count = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
        if count <= at_most or time.monotonic() > deadline:
            return count
        time.sleep(0.05)


def test_build_train_delete_build_leaves_nothing(ranks: Ranks) -> None:
    for counts in ranks.run(built_and_deleted):
        assert len(set(counts[1:])) == 1, counts
