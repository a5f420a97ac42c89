"""Sharded weights on GPUs: a group of one computes what the unsharded model computes, and so
do two ranks that talk over NCCL.
"""

from __future__ import annotations

import copy
import datetime
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from backstash.formats import Usage
from backstash.nn import GroupedMLP, LayerNormMLP, Linear
from backstash.recipes import Operand, Phase, Role, autocast, recipe
from backstash.tensors import GroupedTensor, QuantizedTensor
from backstash.weights import shard_weights, sharded_weights

pytestmark = pytest.mark.gpu

H, TOKENS, STEPS = 64, 40, 3
GATHERS = ("high_precision", "mxfp8", "float8_current", "float8_rowwise", "float8_block", "nvfp4")
EVERY_USAGE = [Usage.ROWWISE, Usage.COLUMNWISE]
COUNTS = [7, 0, 30, 3]
# A second rank needs a second GPU.
SIZES = [min(2, max(1, torch.cuda.device_count()))]


class Experts(nn.Module):
    """Experts with rows that no router decides."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = GroupedMLP(len(COUNTS), H, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x, COUNTS)


def build(device: str) -> nn.Sequential:
    """Weights whose rows two ranks can share evenly in blocks, and some whose rows they cannot."""
    torch.manual_seed(1)
    return nn.Sequential(Linear(H, 96), Linear(96, H), LayerNormMLP(H, 160), Experts()).to(device)


def join(size: int, rank: int, device: str, where: dict[str, Any]) -> None:
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout, **where)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    join(1, 0, "cuda", {"store": dist.HashStore()})  # pyright: ignore
    yield
    dist.destroy_process_group()


def step(model: nn.Module, gather: str, batch: int, device: str) -> Tensor:
    """Forward and backward on one batch; the loss."""
    torch.manual_seed(1000 + batch)
    x = torch.randn(TOKENS, H).to(device).requires_grad_()
    with autocast(recipe=recipe(gather)):
        loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def train_both(gather: str, device: str) -> list[tuple[Tensor, Tensor]]:
    """Train the model, and its sharded twin on this rank's batches; parameters of both."""
    size, rank = dist.get_world_size(), dist.get_rank()
    whole = build(device)
    model = copy.deepcopy(whole)
    sharding = shard_weights(model, gather=gather)
    # A shard is no Parameter of torch's own, for which foreach would be the default on a GPU.
    make = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9, foreach=False)
    optimizers = [make(m.parameters()) for m in (whole, model)]
    for number in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [step(whole, gather, number * size + other, device) for other in range(size)]
        for p in whole.parameters():
            if p.grad is not None:
                p.grad /= size
        loss = step(model, gather, number * size + rank, device)
        torch.testing.assert_close(loss, losses[rank])
        for optimizer in optimizers:
            optimizer.step()
    assert sharding.lent_bytes == 0
    assert (sharding.wire_bytes > 0) == (size > 1)
    shards = sharded_weights(model)
    mine = dict(model.named_parameters())
    return [
        (shards[name].cut.shard(p.data, rank) if name in shards else p.data, mine[name].data)
        for name, p in whole.named_parameters()
    ]


def differing_gathers(gather: str, device: str) -> list[str]:
    """Weights of which some buffer arrives other than it is when the whole is quantized."""
    whole = build(device)
    model = copy.deepcopy(whole)
    shard_weights(model, gather=gather)
    wrong = []
    for name, weight in sharded_weights(model).items():
        for usage in EVERY_USAGE:
            (arrived,) = weight.sharding.gather(weight.bundle, usage)
            full = whole.get_parameter(name).detach()
            wanted = quantized(gather, full, usage)
            if isinstance(arrived, QuantizedTensor):
                alike = all(
                    torch.equal(buffer.view(torch.uint8), wanted.buffers[key].view(torch.uint8))
                    for key, buffer in arrived.buffers.items()
                )
                wrong += [] if alike else [f"{name} {usage}"]
            elif not torch.equal(arrived, full):
                wrong.append(f"{name} {usage}")
    return wrong


def quantized(gather: str, full: Tensor, usage: Usage) -> Any:
    role = Role(Operand.WEIGHT, Phase.FORWARD, "Linear")
    format = recipe(gather).format(role).along(usage)
    if full.ndim == 2:
        return format.quantize(full, usage)
    rows = full.shape[0] * full.shape[1]
    ends = range(full.shape[1], rows + 1, full.shape[1])
    return format.quantize(GroupedTensor(full.reshape(rows, -1), list(ends)), usage).data


def check_rank(rank: int, size: int, store: str, device: str) -> None:
    """What each process does: every way to gather, one after the other."""
    torch.use_deterministic_algorithms(True)
    if device == "cuda":
        torch.cuda.set_device(rank)
    join(size, rank, device, {"init_method": f"file://{store}"})
    for gather in GATHERS:
        assert differing_gathers(gather, device) == [], gather
        for wanted, came in train_both(gather, device):
            torch.testing.assert_close(came, wanted, msg=lambda text, g=gather: f"{g}: {text}")
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_a_group_of_one_trains_bit_for_bit_like_the_unsharded_model() -> None:
    assert all(torch.equal(*pair) for pair in train_both("high_precision", "cuda"))


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("gather", GATHERS)
def test_a_gather_in_a_group_of_one_is_the_whole_weight_quantized(gather: str) -> None:
    assert differing_gathers(gather, "cuda") == []


@pytest.mark.parametrize("size", SIZES)
def test_ranks_of_their_own_train_like_the_unsharded_model(size: int, tmp_path: Path) -> None:
    arguments = (size, str(tmp_path / "store"), "cuda")
    torch.multiprocessing.spawn(check_rank, arguments, nprocs=size)  # pyright: ignore
