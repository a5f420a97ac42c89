"""GPUs that copy each other's shards see what a collective would bring, however late one is."""

from __future__ import annotations

import datetime
import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from backstash.nn import GroupedMLP, LayerNormMLP, Linear
from backstash.weights import Sharding, ShardOptions, shard_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU"),
]

H, TOKENS, STEPS = 512, 256, 6
LATE = 20_000_000  # cycles, about ten milliseconds


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = GroupedMLP(3, H, 96)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x, [100, 0, TOKENS - 100])


def build() -> nn.Sequential:
    """Weights whose rows two ranks share evenly, unevenly, and one of which one rank has none."""
    torch.manual_seed(1)
    layers = [Linear(H, 1023), Linear(1023, H), LayerNormMLP(H, 4 * H), Experts(), Linear(H, 1)]
    return nn.Sequential(*layers).cuda()


def trained(rank: int, carrier: str, *, late: bool) -> tuple[nn.Module, Sharding]:
    """A model after some steps, in each of which another rank is late in another place."""
    model = build()
    options = ShardOptions(carrier=carrier, together_bytes=1 << 20)
    sharding = shard_weights(model, prefetch=2, options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for step in range(STEPS):
        pause = functools.partial(torch.cuda._sleep, LATE if late and step % 2 == rank else 0)
        torch.manual_seed(100 * step + rank)
        x = torch.randn(TOKENS, H, device="cuda", requires_grad=True)
        pause()
        y = model(x).square().mean()
        pause()
        y.backward()
        pause()
        optimizer.step()
        pause()
        optimizer.zero_grad()
    return model, sharding


def check_rank(rank: int, store: str) -> None:
    """What each process does."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    wanted, collective = trained(rank, "collective", late=False)
    assert collective.channel.peers is None
    for late in (False, True):
        model, sharding = trained(rank, "peers", late=late)
        peers: Any = sharding.channel.peers
        assert peers.pulls > 0
        assert sharding.lent_bytes == 0
        for mine, theirs in zip(model.parameters(), wanted.parameters(), strict=True):
            assert torch.equal(mine.data, theirs.data)
    dist.destroy_process_group()


def test_two_gpus_train_the_same_bits_by_copies_as_by_collectives(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(check_rank, (str(tmp_path / "store"),), nprocs=2)  # pyright: ignore
