"""Sharded weights of layers that run beside each other, each on a stream of its own."""

from __future__ import annotations

import enum
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import backstash as bs
from backstash.weights import ShardOptions, shard_weights

pytestmark = pytest.mark.gpu

H, TOKENS, STEPS = 512, 256, 4
LATE = 60_000_000  # cycles, about thirty milliseconds: longer than the host needs for a layer


class Behind(enum.Enum):
    """Whose work is not done when the host has launched what comes next; nobody's in WHOLE."""

    WHOLE = "one stream"
    #: Layers still read weights when the memory is wanted for others.
    LAYERS = "late layers"
    #: Weights arrive after the layers that read them were launched.
    WEIGHTS = "late weights"
    #: Gradients are made after what adds them up was launched.
    GRADIENTS = "late gradients"


@pytest.fixture(autouse=True)
def group_of_one() -> Iterator[None]:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1, store=store)
    yield
    dist.destroy_process_group()


class Branches(nn.Module):
    """Layers that read the same input, each on its own stream unless nobody is to be behind."""

    def __init__(self, behind: Behind) -> None:
        super().__init__()
        torch.manual_seed(1)
        # A bias is a parameter of torch's own, for whose gradient autograd waits by itself.
        self.layers = nn.ModuleList(bs.Linear(H, H, bias=False) for _ in range(6))
        self.behind = behind
        self.lanes = [torch.cuda.Stream() for _ in self.layers]

    def forward(self, x: Tensor) -> Tensor:
        if self.behind is Behind.WHOLE:
            return torch.stack([layer(x) for layer in self.layers]).sum(0)
        now = torch.cuda.current_stream()
        for lane in self.lanes:
            lane.wait_stream(now)
        if self.behind is Behind.WEIGHTS:
            torch.cuda._sleep(LATE)
        outputs = [self.branch(i, x) for i in range(len(self.layers))]
        for lane in self.lanes:
            now.wait_stream(lane)
        for y in outputs:
            y.record_stream(now)
        return torch.stack(outputs).sum(0)

    def branch(self, i: int, x: Tensor) -> Tensor:
        """One layer on its stream; every other one is late."""
        late = LATE if i % 2 == 0 else 0
        with torch.cuda.stream(self.lanes[i]):
            if self.behind is Behind.LAYERS:
                torch.cuda._sleep(late)
            y = self.layers[i](x)
            # Memory that a lane gives back is taken at once by what comes next in it.
            del y
            y = self.layers[i](x)
            if self.behind is Behind.GRADIENTS:
                y.register_hook(lambda dy: torch.cuda._sleep(late))
        return y


def trained(model: Branches, gather: str) -> list[Tensor]:
    """Losses and parameters after a few steps, between which the weights become others."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        x = torch.randn(TOKENS, H, device="cuda")
        with bs.autocast(recipe=gather):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        # A gradient that is there is added to within backward, where it arrives.
        optimizer.zero_grad(set_to_none=False)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(-3)  # what is read from the step before is far off
        losses.append(loss.detach())
    return [*losses, *(p.data for p in model.parameters())]


@pytest.mark.parametrize(
    "behind", [b for b in Behind if b is not Behind.WHOLE], ids=lambda behind: behind.value
)
@pytest.mark.parametrize("gather", ["mxfp8", "high_precision"])
def test_layers_on_streams_of_their_own_train_as_on_one(gather: str, behind: Behind) -> None:
    wanted = trained(Branches(Behind.WHOLE).cuda(), gather)
    several = Branches(behind).cuda()
    # Each weight moves by itself, in the midst of work on the weights before it.
    options = ShardOptions(together_bytes=1)
    shard_weights(several, prefetch=1, gather=gather, options=options)
    for came, expected in zip(trained(several, gather), wanted, strict=True):
        torch.testing.assert_close(came, expected)
