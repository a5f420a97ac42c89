"""A sharded weight is an ordinary parameter of the shape of its shard."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import nn
from twins import Stack, differing, stack_step, train_twins

from backstash import keep_identity, save_for_backward, saved_values
from backstash.errors import ConfigError, ModifiedError
from backstash.moe import Local, MoE
from backstash.saving import saving
from backstash.stash import PagePool, Stash
from backstash.weights import (
    DistributedWeight,
    ShardedWeight,
    ShardOptions,
    is_distributed_weight,
    shard_weights,
    sharded_weights,
)

pytestmark = pytest.mark.distributed

OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"amsgrad": True},
    "AdamW": {"foreach": True},
    "Adagrad": {},
    "RMSprop": {"centered": True},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {"foreach": False},
    "Adadelta": {},
    "ASGD": {},
    "Rprop": {},
}


def with_optimizer(group: Any, name: str) -> list[str]:
    twin, model = Stack(2, 9), Stack(2, 9)
    shard_weights(model, group)
    make = getattr(torch.optim, name)
    options = OPTIMIZERS[name]
    train_twins(twin, model, stack_step, lambda parameters: make(parameters, lr=0.01, **options))
    return differing(twin, model)


def all_optimizers(group: Any) -> dict[str, list[str]]:
    return {name: with_optimizer(group, name) for name in OPTIMIZERS}


def test_optimizers_that_work_by_element_do_what_they_do_on_the_whole(ranks: Ranks) -> None:
    assert ranks.run(all_optimizers) == [{name: [] for name in OPTIMIZERS}] * 2


def a_parameter(group: Any) -> None:
    model = Stack(1, 5)
    shard_weights(model, group)
    (weight,) = sharded_weights(model).values()
    rank = weight.sharding.channel.rank
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, ShardedWeight)
    assert isinstance(weight, DistributedWeight)
    assert is_distributed_weight(weight)
    assert weight.is_leaf
    assert weight.shape == [(2, 5), (2, 5), (1, 5), (0, 5)][rank]
    assert weight.shard.data_ptr() == weight.data_ptr()
    start, end = weight.cut.cuts[rank : rank + 2]
    assert f"layers.0.weight, rows {start} to {end} of (5, 5)" in repr(weight)
    assert type(torch.zeros_like(weight)) is torch.Tensor
    model.double()
    assert model.layers[0].weight is weight  # pyright: ignore
    assert weight.dtype is torch.float64


def test_five_rows_on_four_ranks_are_parameters_like_any_others(ranks: Ranks) -> None:
    ranks.run(a_parameter, size=4)


def not_alone(group: Any) -> None:
    model = Stack(1)
    shard_weights(model, group)
    for what in (model, model.layers[0].weight):
        with pytest.raises(ConfigError, match="cannot be copied on one rank alone"):
            copy.deepcopy(what)
    with pytest.raises(ConfigError, match="cannot be pickled"):
        torch.save(model, io.BytesIO())
    with pytest.raises(ConfigError, match=r"set weight\.main_grad"):
        model.layers[0].weight.grad_buffer()  # pyright: ignore


def test_what_one_rank_cannot_do_alone_is_refused(ranks: Ranks) -> None:
    ranks.run(not_alone)


def whole_states(group: Any) -> None:
    twin, model = Stack(2), Stack(2)
    torch.manual_seed(9)
    for p in twin.parameters():
        nn.init.normal_(p)
    shard_weights(model, group)
    model.load_state_dict(twin.state_dict())
    assert differing(twin, model) == []
    # What a rank has of a state dict fits as well, and is what it says it is.
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    model.load_state_dict(state)
    assert differing(twin, model) == []


def test_a_state_dict_of_whole_weights_or_of_shards_loads(ranks: Ranks) -> None:
    ranks.run(whole_states, size=3)


class _Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        save_for_backward(ctx, weight)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        (weight,) = saved_values(ctx)
        return dy * (type(weight) is ShardedWeight), None


def changed_before_backward(group: Any) -> None:
    model = Stack(1)
    shard_weights(model, group)
    (weight,) = sharded_weights(model).values()
    assert keep_identity(weight) is weight
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
        y = _Saves.apply(x, weight)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1]
    y = _Saves.apply(x, weight)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(ModifiedError):
        y.sum().backward()


def test_it_comes_back_as_itself_and_a_change_before_backward_raises(ranks: Ranks) -> None:
    ranks.run(changed_before_backward, size=1)


def compiled(group: Any) -> None:
    model = Stack(1)
    shard_weights(model, group)
    compiled = torch.compile(model, backend="eager")
    x, found = torch.randn(2, 12), []
    for run in (model, compiled):
        y = run(x)
        y.square().sum().backward()
        found.append([y, *(p.grad for p in model.parameters())])
        model.zero_grad()
    assert all(map(torch.equal, *found))


def test_a_compiled_model_gathers_its_sharded_weights(ranks: Ranks) -> None:
    ranks.run(compiled, size=1)


def fused(group: Any) -> None:
    from backstash.nn import Linear

    torch.manual_seed(1)
    twin = Linear(12, 5, fuse_wgrad_accumulation=True)
    model = Linear(12, 5, fuse_wgrad_accumulation=True)
    model.load_state_dict(twin.state_dict())
    sharding = shard_weights(model, group)
    weight: Any = model.weight
    rank, size = sharding.channel.rank, sharding.channel.size
    with pytest.raises(ConfigError, match="main_grad"):
        model(torch.randn(3, 12)).sum().backward()
    whole: Any = twin.weight
    for w in (whole, weight):
        w.main_grad = torch.zeros(w.shape)
        w.grad_added_to_main_grad = False
    for step in range(2):
        for batch in range(size):
            torch.manual_seed(10 * step + batch)
            x = torch.randn(3, 12)
            twin(x).square().sum().backward()
            if batch == rank:
                model(x).square().sum().backward()
    wanted = weight.cut.shard(whole.main_grad / size, rank)
    torch.testing.assert_close(weight.main_grad, wanted)
    assert weight.grad is None
    assert weight.grad_added_to_main_grad


def test_gradients_accumulate_in_a_main_grad_of_the_shape_of_the_shard(ranks: Ranks) -> None:
    ranks.run(fused)


def delayed(group: Any) -> None:
    from backstash.nn import Linear

    torch.manual_seed(1)
    twin, model = Linear(12, 5), Linear(12, 5, delay_wgrad_compute=True)
    model.load_state_dict(twin.state_dict())
    sharding = shard_weights(model, group)
    weight: Any = model.weight
    rank, size = sharding.channel.rank, sharding.channel.size
    for batch in range(size):
        torch.manual_seed(batch)
        x = torch.randn(3, 12)
        twin(x).square().sum().backward()
        if batch == rank:
            model(x).square().sum().backward()
    assert weight.grad is None
    model.backward_dw()
    sharding.join()
    assert twin.weight.grad is not None
    torch.testing.assert_close(weight.grad, weight.cut.shard(twin.weight.grad / size, rank))


def late_on_one(group: Any) -> None:
    """One rank computes its weight gradients late, another has none, for several steps."""
    from backstash.nn import Linear

    torch.manual_seed(1)
    model = Linear(12, 5, delay_wgrad_compute=True)
    sharding = shard_weights(model, group)
    weight: Any = model.weight
    for step in range(4):
        weight.grad = None
        x = torch.randn(3, 12)
        model(x).square().sum().backward()
        if sharding.channel.rank == 0 or step == 3:
            model.backward_dw()
        sharding.join()
        assert weight.grad is not None
        assert weight.grad.any()
    model(x).sum().backward()
    weight.grad = None
    model.backward_dw()
    with pytest.raises(ConfigError, match=r"call sharding\.join"):
        model(x)
    sharding.join()
    assert weight.grad is not None
    model(x)


def test_a_rank_without_late_gradients_joins_those_of_the_others(ranks: Ranks) -> None:
    ranks.run(late_on_one, size=2)


def test_delayed_weight_gradients_are_reduced_when_they_are_computed(ranks: Ranks) -> None:
    ranks.run(delayed, size=3)


def experts_in_pages(group: Any, split: str) -> tuple[int, bool]:
    torch.manual_seed(0)
    model = nn.Sequential(MoE(16, 12, 4, 2, dispatcher=Local(capacity_factor=2.0)))
    stash = Stash(PagePool(2**20, device="cpu", page_bytes=512))
    x = torch.randn(50, 16)
    gradients: list[list[Any]] = []
    for is_sharded in (False, True):
        if is_sharded:
            shard_weights(model, group, options=ShardOptions(split=split))
        x_leaf = x.clone().requires_grad_()
        with saving(*[stash] if is_sharded else []):
            loss = model(x_leaf).square().sum()
        loss.backward()
        gradients.append([loss.detach(), x_leaf.grad])
    return stash.stats().claimed, all(map(torch.equal, *gradients))


@pytest.mark.parametrize("split", ["rows", "experts"])
def test_experts_whose_weights_are_sharded_compute_in_pages(ranks: Ranks, split: str) -> None:
    assert ranks.run(experts_in_pages, split) == [(1, True)] * 2
