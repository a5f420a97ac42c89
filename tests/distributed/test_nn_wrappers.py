"""Layers in the wrappers of torch: DDP and ``fully_shard`` see parameters like any others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from backstash.moe import Local, MoE
from backstash.nn import LayerNormLinear, LayerNormMLP, Linear
from backstash.recipes import autocast
from backstash.saving import saving
from backstash.stash import PagePool, Stash

pytestmark = pytest.mark.distributed
H = 16
MICROBATCHES = 2  # gradients are added up over them, and brought together once


class Block(nn.Module):
    """A residual block of each kind of layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = LayerNormLinear(H, H)
        self.moe = MoE(H, 24, 4, 2, dispatcher=Local(capacity_factor=2.0))
        self.mlp = LayerNormMLP(H, 24, activation="swiglu")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.inward(x)
        x = x + self.moe(x)
        return x + self.mlp(x)


class Model(nn.Module):
    """Two blocks, each of which may be computed again in backward."""

    def __init__(self, *, recomputed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = Linear(H, H)
        self.recomputed = recomputed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            again = checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
            x = again  # pyright: ignore
        return self.head(x)


def backward(model: nn.Module, batch: int, recipe: str, *handlers: Any) -> None:
    torch.manual_seed(1000 + batch)
    x = torch.randn(2, 5, H)
    with autocast(recipe=recipe), saving(*handlers):
        loss = model(x).square().mean()
    loss.backward()


def trained_alone(recipe: str) -> nn.Module:
    """The model that sees the batches of both ranks, and halves their gradients."""
    twin = Model()
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for number in range(3):
        optimizer.zero_grad()
        sums: list[Any] = []
        for rank in range(2):
            twin.zero_grad()
            for micro in range(MICROBATCHES):
                backward(twin, 10 * number + 2 * micro + rank, recipe)
            sums.append([p.grad for p in twin.parameters()])
        for p, one, other in zip(twin.parameters(), *sums, strict=True):
            p.grad = (one + other) / 2
        optimizer.step()
    return twin


def whole(p: Any) -> Tensor:
    return (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()


def trained_together(group: Any, wrapper: str, recipe: str) -> None:
    rank, model = dist.get_rank(group), Model(recomputed=wrapper.endswith("recomputed"))
    handlers = []
    if wrapper.endswith("stashed"):
        handlers.append(Stash(PagePool(1 << 20, device="cpu", page_bytes=256)))
    if wrapper.startswith("ddp"):
        wrapped: Any = DistributedDataParallel(model, process_group=group)
    else:
        mesh = DeviceMesh.from_group(group, "cpu")
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward="kept" not in wrapper)
        wrapped = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    for number in range(3):
        optimizer.zero_grad()
        for micro in range(MICROBATCHES):
            is_last = micro == MICROBATCHES - 1
            if isinstance(wrapped, DistributedDataParallel):
                wrapped.require_backward_grad_sync = is_last
            else:
                wrapped.set_requires_gradient_sync(is_last)
            backward(wrapped, 10 * number + 2 * micro + rank, recipe, *handlers)
        optimizer.step()
    twin = trained_alone(recipe)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(whole(p), q.detach()), name
    assert all(stash.stats().bytes_stashed > 0 for stash in handlers)
    assert all(stash.stats().device_used == 0 for stash in handlers)


@pytest.mark.parametrize("recipe", ["high_precision", "mxfp8"])
@pytest.mark.parametrize(
    "wrapper",
    [
        "ddp",
        "ddp, recomputed",
        "ddp, stashed",
        "fully_shard",
        "fully_shard, kept",
        "fully_shard, recomputed",
        "fully_shard, stashed",
    ],
)
def test_a_model_in_a_wrapper_of_torch_trains_bit_for_bit_as_without(
    ranks: Ranks, wrapper: str, recipe: str
) -> None:
    ranks.run(trained_together, wrapper, recipe)
