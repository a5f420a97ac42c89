"""A transfer is finished once, and holds what its state says until then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks
from twins import Stack, nothing_is_lent

from backstash.errors import BackstashError
from backstash.formats import Usage
from backstash.weights import State, shard_weights, sharded_weights

pytestmark = pytest.mark.distributed


def through_its_states(group: Any) -> None:
    twin, model = Stack(1), Stack(1)
    sharding = shard_weights(model, group)
    (weight,) = sharded_weights(model).values()
    bundle = weight.bundle
    assert weight.state is State.SHARDED
    gather = bundle.gather(Usage.ROWWISE)
    assert weight.state is State.GATHERING
    (whole,) = gather.take()
    assert weight.state is State.GATHERED
    assert torch.equal(whole, twin.layers[0].weight)  # pyright: ignore
    reader = whole[0]
    del whole
    assert weight.state is State.GATHERED
    with pytest.raises(BackstashError, match="finished once"):
        gather.take()
    del reader
    assert nothing_is_lent(sharding)
    assert weight.state is State.SHARDED
    bundle.gather(Usage.COLUMNWISE).drop()
    assert weight.state is State.SHARDED
    reduction = bundle.reduce([torch.ones(weight.cut.shape)], None)
    assert weight.state is State.REDUCING
    (share,) = reduction.finish()
    assert torch.equal(share, torch.full(weight.shape, 2.0))
    assert weight.state is State.SHARDED
    with pytest.raises(BackstashError, match="finished once"):
        reduction.finish()


def test_a_weight_goes_through_its_states_and_back(ranks: Ranks) -> None:
    ranks.run(through_its_states)


def changed_on_the_way(group: Any) -> None:
    model = Stack(2)
    shard_weights(model, group)
    weight = sharded_weights(model)["layers.0.weight"]
    gather = weight.bundle.gather(Usage.ROWWISE)
    assert not gather.is_stale
    with torch.no_grad():
        weight.add_(1)
    assert gather.is_stale
    gather.drop()


def test_a_gather_of_a_shard_that_was_changed_since_is_stale(ranks: Ranks) -> None:
    ranks.run(changed_on_the_way)


def added_up(group: Any, wide: torch.dtype | None) -> list[float]:
    model = Stack(1, dtype=torch.bfloat16)
    shard_weights(model, group)
    (weight,) = sharded_weights(model).values()
    # 256 + 1 + 1 in bfloat16, whose integers end at 256: it takes a wide sum to see the ones.
    grad = torch.full(weight.cut.shape, 256.0 if weight.sharding.channel.rank == 0 else 1.0)
    (share,) = weight.bundle.reduce([grad], wide).finish()
    assert share.dtype == (wide or torch.bfloat16)
    return share.unique().tolist()


def test_a_sum_in_float32_keeps_what_one_in_bfloat16_loses(ranks: Ranks) -> None:
    assert ranks.run(added_up, torch.float32, size=3) == [[258.0]] * 3
    assert ranks.run(added_up, None, size=3) != [[258.0]] * 3
