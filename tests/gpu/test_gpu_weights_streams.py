"""Sharded weights of layers that run beside each other, each on a stream of its own."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import backstash as bs
from backstash.weights import ShardOptions, shard_weights

pytestmark = [
    pytest.mark.gpu,
    # The input is read on all streams, and where its gradient is added up torch waits for them.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
]

H, TOKENS, STEPS = 512, 256, 4
LATE = 60_000_000  # cycles, about thirty milliseconds: longer than the host needs for a layer


@pytest.fixture(autouse=True)
def group_of_one() -> Iterator[None]:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1, store=store)
    yield
    dist.destroy_process_group()


class Branches(nn.Module):
    """Layers that read the same input, each on its own stream, of which some are late."""

    def __init__(self, streams: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(bs.Linear(H, H) for _ in range(6))
        self.lanes = [torch.cuda.Stream() for _ in self.layers] if streams else None

    def forward(self, x: Tensor) -> Tensor:
        if self.lanes is None:
            return torch.stack([layer(x) for layer in self.layers]).sum(0)
        now = torch.cuda.current_stream()
        outputs = []
        for i, (layer, lane) in enumerate(zip(self.layers, self.lanes, strict=True)):
            lane.wait_stream(now)
            with torch.cuda.stream(lane):
                torch.cuda._sleep(LATE if i % 2 == 0 else 0)
                y = layer(x)
                # Memory that a lane gives back is taken at once by what comes next in it.
                del y
                y = layer(x)
                y.record_stream(now)
            outputs.append(y)
        for lane in self.lanes:
            now.wait_stream(lane)
        return torch.stack(outputs).sum(0)


def trained(model: Branches, gather: str) -> list[Tensor]:
    """Losses and parameters after a few steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        x = torch.randn(TOKENS, H, device="cuda", requires_grad=True)
        with bs.autocast(recipe=gather):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.data for p in model.parameters())]


@pytest.mark.parametrize("gather", ["mxfp8", "high_precision"])
def test_layers_on_streams_of_their_own_train_as_on_one(gather: str) -> None:
    one = Branches(streams=False).cuda()
    wanted = trained(copy.deepcopy(one), gather)
    several = Branches(streams=True).cuda()
    # Each weight moves by itself, in the midst of work on the weights before it.
    options = ShardOptions(together_bytes=1)
    shard_weights(several, prefetch=1, gather=gather, options=options)
    for came, expected in zip(trained(several, gather), wanted, strict=True):
        torch.testing.assert_close(came, expected)
