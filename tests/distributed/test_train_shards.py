"""Parts become whole on the first rank, and whole tensors become parts on all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks as Pool
from torch.nn.utils import get_total_norm

from backstash.nn import GroupedLinear, Linear
from backstash.train.shards import Shards, count_parameters
from backstash.weights import shard_weights, sharded_weights

pytestmark = pytest.mark.distributed


def whole_model() -> torch.nn.Sequential:
    torch.manual_seed(1)
    # Three rows on four ranks: the last one has none.
    return torch.nn.Sequential(Linear(4, 3), GroupedLinear(3, 5, 2, bias=False), Linear(2, 1))


def check_there_and_back(group: dist.ProcessGroup) -> None:
    twin, model = whole_model(), whole_model()
    wanted = dict(twin.named_parameters())
    shard_weights(model, group)
    shards = Shards(sharded_weights(model))
    assert count_parameters(model) == sum(p.numel() for p in wanted.values())
    for name, part in model.named_parameters():
        whole = shards.whole(name, part.detach())
        back = shards.part(name, wanted[name])
        assert torch.equal(back, part)
        if dist.get_rank(group) == 0:
            assert torch.equal(whole, wanted[name])
        elif name in sharded_weights(model):
            assert whole.numel() == 0


def check_norm(group: dist.ProcessGroup) -> None:
    twin, model = whole_model(), whole_model()
    shard_weights(model, group)
    shards = Shards(sharded_weights(model))
    whole = {name: torch.randn_like(p) for name, p in twin.named_parameters()}
    parts = {name: shards.part(name, value) for name, value in whole.items()}
    norm = shards.norm(parts)
    torch.testing.assert_close(norm, get_total_norm(list(whole.values())))
    of_all: list[float] = [0.0] * dist.get_world_size(group)
    dist.all_gather_object(of_all, norm.item(), group=group)
    assert len(set(of_all)) == 1


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_part_becomes_whole_on_the_first_rank_and_a_part_again(ranks: Pool, size: int) -> None:
    ranks.run(check_there_and_back, size=size)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_norm_of_parts_is_that_of_the_whole_and_the_same_on_all(ranks: Pool, size: int) -> None:
    ranks.run(check_norm, size=size)


def test_without_parts_everything_is_as_it_is() -> None:
    shards = Shards()
    x = torch.randn(3, 4)
    assert shards.whole("weight", x) is x
    assert shards.part("weight", x) is x
    assert torch.equal(shards.norm({"weight": x}), get_total_norm([x]))
