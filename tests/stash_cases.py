"""Small models whose buffers are larger than what is valid in them, and pools to stash them in."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import backstash as bs
from backstash.kernels import PoolState
from backstash.stash import PagePool, Policy, Stash, Tail, Take

PAGE = 256
WIDTH = 32

BALANCED = (7, 7, 7, 7)
COUNTS = {
    "balanced": BALANCED,
    "one hot": (0, 28, 0, 0),
    "nothing": (0, 0, 0, 0),
    "one row": (0, 0, 0, 1),
    "full": (24, 1, 0, 23),
    "over capacity": (30, 30, 30, 30),
}
CAPACITY = 48


class _Scale(torch.autograd.Function):
    """``x * factor`` that saves a marked copy of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, factor: float) -> Tensor:
        kept = x.clone()
        bs.mark_grouped_tensor(kept, rows)
        bs.save_for_backward(ctx, kept, rows)
        ctx.plan = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        kept, rows = bs.saved_values(ctx)
        valid = torch.arange(len(kept)) < rows
        used = torch.where(valid[:, None], kept, 0.0)
        return grads[0] * ctx.plan + used, None, None


def scale(x: Tensor, rows: int, factor: float = 2.0) -> Tensor:
    """A function whose gradient shows every valid bit that it saved."""
    return _Scale.apply(x, torch.tensor([rows]), factor)


class Experts(nn.Module):
    """A few layers of experts, each after a norm, on a buffer of ``CAPACITY`` rows."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(bs.GroupedMLP(4, WIDTH, 32) for _ in range(layers))

    def forward(self, x: Tensor, counts: Sequence[int] = BALANCED) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, torch.tensor(counts)).tanh()
        return x


class Copying:
    """A stash that gives tensors only, as to a node that cannot read pages."""

    def __init__(self, kept: Stash) -> None:
        self.pack, self.unpack = kept.pack, kept.unpack
        self.expect, self.multiply = kept.expect, kept.multiply


@dataclasses.dataclass
class Result:
    """What a step leaves that must be the same, bit for bit."""

    loss: Tensor
    gradients: list[Tensor]

    def assert_equal(self, other: Result) -> None:
        assert torch.equal(self.loss, other.loss)
        for one, two in zip(self.gradients, other.gradients, strict=True):
            assert torch.equal(one, two)


def poisoned(rows: int, counts: Sequence[int]) -> Tensor:
    """Rows to work on; those past the valid ones are NaN."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, WIDTH, generator=generator)
    x[min(sum(counts), rows) :] = torch.nan
    return x


def step(
    model: Callable[..., Tensor],
    parameters: Sequence[Tensor],
    counts: Sequence[int] = BALANCED,
    *handlers: Any,
) -> Result:
    """Forward with handlers, backward without; the loss reads valid rows alone."""
    for parameter in parameters:
        parameter.grad = None
    x = poisoned(CAPACITY, counts).requires_grad_()
    context = bs.saving(*handlers) if handlers else contextlib.nullcontext()
    with context:
        y = model(x * 1.0, counts)
        loss = y[: min(sum(counts), CAPACITY)].square().sum()
    loss.backward()
    assert x.grad is not None
    valid = min(sum(counts), CAPACITY)
    gradients = [p.grad.clone() for p in parameters if p.grad is not None]
    return Result(loss.detach().clone(), [x.grad[:valid].clone(), *gradients])


def pool(pages: int = 4096, host_pages: int = 0, page_bytes: int = PAGE) -> PagePool:
    """A pool of so many small pages on the CPU."""
    return PagePool(
        pages * page_bytes, host_pages * page_bytes, device="cpu", page_bytes=page_bytes
    )


def stash(
    pages: int = 4096,
    host_pages: int = 0,
    *,
    policy: Policy = Policy.SPILL,
    take: Take = Take.MARKED,
    tail: Tail = Tail.UNSPECIFIED,
    compress: bs.Format | None = None,
    ahead: int = 1,
) -> Stash:
    """A stash in front of such a pool."""
    options = {"policy": policy, "take": take, "tail": tail, "compress": compress, "ahead": ahead}
    return Stash(pool(pages, host_pages), **options)


def assert_nothing_is_held(kept: Stash | PagePool) -> None:
    """No page is in use, and the free list is a permutation of all pages."""
    gc.collect()
    holder = kept.pool if isinstance(kept, Stash) else kept
    counters = holder.counters()
    assert holder.is_empty()
    assert counters[PoolState.MISSING] == 0
    sizes = (holder.device_size, holder.host_size)
    free = holder.memory.free_N
    assert counters[PoolState.TAIL_DEVICE] - counters[PoolState.HEAD_DEVICE] == sizes[0]
    assert counters[PoolState.TAIL_HOST] - counters[PoolState.HEAD_HOST] == sizes[1]
    assert sorted(free[: sizes[0]].tolist()) == list(range(sizes[0]))
    assert sorted(free[sizes[0] :].tolist()) == list(range(sizes[0], sum(sizes)))
