"""Where ranks cannot read each other's memory, weights go through the process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks
from twins import ADAM, Stack, differing, stack_step, train_twins

from backstash.weights import ShardOptions, shard_weights
from backstash.weights.layout import Layout
from backstash.weights.peers import PeerMemory

pytestmark = pytest.mark.distributed


def without_gpus(group: Any) -> list[str]:
    twin, model = Stack(3), Stack(3)
    sharding = shard_weights(model, group, options=ShardOptions(carrier="peers"))
    assert sharding.channel.peers is None
    train_twins(twin, model, stack_step, ADAM)
    return differing(twin, model)


def test_on_a_cpu_the_process_group_carries_the_weights(ranks: Ranks) -> None:
    assert ranks.run(without_gpus) == [[], []]


@pytest.mark.parametrize(("rows", "wanted"), [(1, 512), (512, 2048), (1021, 4096)])
def test_every_rank_reserves_as_much_as_the_longest_shard_takes(rows: int, wanted: int) -> None:
    layout = Layout.even(torch.Size((rows, 4)), 2)
    assert PeerMemory.bytes_for(layout, itemsize=2) == wanted
