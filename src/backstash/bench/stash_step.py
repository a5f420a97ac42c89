"""What the stash does to a whole step: ``backstash bench stash_step``.

Some layers of experts, one after the other, each with the buffers of one rank of an
expert-parallel group: a capacity of so many times an even load.  The same step is run with the
stash and without.  Loss and gradients are compared first, bit for bit; then both are timed in
turns, and on a GPU their peaks are measured, beside what the formula says: *worst case once,
valid bytes in pages, and what is in flight*.

Letters: T tokens, K experts a token, H features, I features inside an expert, E experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from backstash.bench.record import Row
from backstash.bench.timing import time_gpu_pair, time_pair
from backstash.bench.workloads import IMBALANCES, Load, ScriptedRouter, router_choices
from backstash.device import default_device, device_name
from backstash.moe import Local, MoE
from backstash.saving import saving
from backstash.stash import PagePool, Stash, pages_for

SLOWER_AT_MOST = 1.02
PAGE_BYTES = 1 << 16
FACTORS = (2.0, 4.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a model."""

    layers: int
    load: Load
    hidden: int
    ffn: int
    dtype: torch.dtype

    def capacity(self, factor: float) -> int:
        """Rows of one layer's buffers."""
        even = self.load.tokens * self.load.top_k // self.load.ranks
        return int(factor * even)

    @property
    def row_bytes(self) -> tuple[int, ...]:
        """Bytes of a row of what the experts save: input, pre-activation, routing weight."""
        item = self.dtype.itemsize
        return self.hidden * item, 2 * self.ffn * item, 4


SHAPES: Mapping[str, Shape] = {
    "cpu": Shape(
        layers=3,
        load=Load(tokens=256, experts=8, top_k=2, ranks=2),
        hidden=64,
        ffn=32,
        dtype=torch.float32,
    ),
    "cuda": Shape(
        layers=16,
        load=Load(tokens=32768, experts=128, top_k=8, ranks=8),
        hidden=2048,
        ffn=768,
        dtype=torch.bfloat16,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRow(Row):
    """One row: ``values`` layers; ``pair`` with the stash and without."""

    device: str
    imbalance: str
    capacity_factor: float
    peak_bytes: int | None
    plain_peak_bytes: int | None
    expected_saving_bytes: int
    stash: str


class Step(nn.Module):
    """Forward and backward of all layers from inputs that stay where they are."""

    def __init__(self, shape: Shape, factor: float, imbalance: str, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        # The last rank has none where a rank is idle, the first is the hot one.
        rank = shape.load.ranks - 1 if imbalance == "idle_rank" else 0
        dispatcher = Local(capacity_factor=factor, keep_experts=shape.load.experts_of(rank))
        script = list(router_choices(IMBALANCES[imbalance], shape.load, steps=1))
        new = {"device": device, "dtype": shape.dtype}
        self.norms = nn.ModuleList(nn.RMSNorm(shape.hidden, **new) for _ in range(shape.layers))
        self.layers = nn.ModuleList()
        for _ in range(shape.layers):
            layer = MoE(
                shape.hidden,
                shape.ffn,
                shape.load.experts,
                shape.load.top_k,
                dispatcher=dispatcher,
                **new,
            )
            ScriptedRouter(layer, script)
            self.layers.append(layer)
        self.x = torch.randn(shape.load.tokens, shape.hidden, **new).requires_grad_()
        self.stash: Stash | None = None

    def forward(self) -> list[Tensor]:
        """The loss and the gradients of input and weights."""
        with saving(*([self.stash] if self.stash else [])):
            x = self.x
            for norm, layer in zip(self.norms, self.layers, strict=True):
                x = x + layer(norm(x))
            loss = x.float().square().mean()
        inputs = [self.x, *self.parameters()]
        grads = torch.autograd.grad(loss, inputs, allow_unused=True)
        if self.stash:
            self.stash.settle()
        return [loss.detach(), *(grad for grad in grads if grad is not None)]

    def run(self, stash: Stash | None) -> list[Tensor]:
        """One step with or without a stash."""
        self.stash = stash
        return self()


def measure(repeats: int) -> list[StepRow]:
    """Compare, then time every imbalance at every capacity factor.

    Raises:
        RuntimeError: Gradients differ in a bit; nothing is timed.
    """
    device = default_device()
    shape = SHAPES[device.type]
    return [
        _measure(shape, factor, imbalance, repeats, device)
        for factor in FACTORS
        for imbalance in IMBALANCES
    ]


def _measure(
    shape: Shape, factor: float, imbalance: str, repeats: int, device: torch.device
) -> StepRow:
    step = Step(shape, factor, imbalance, device)
    capacity = shape.capacity(factor)
    whole = pages_for([(capacity, width) for width in shape.row_bytes], PAGE_BYTES)
    # Room for the worst case, so that nothing is kept back while counters are under way; what
    # the pool itself takes is no part of the peaks, the pages that were in use are.
    pool = PagePool(whole * shape.layers * PAGE_BYTES, device=device, page_bytes=PAGE_BYTES)
    stash = Stash(pool)
    check_gradients(imbalance, step.run(stash), step.run(None))
    peak = _peak(step, stash, device)
    plain_peak = _peak(step, None, device)
    used = stash.stats().device_high * PAGE_BYTES
    time = time_gpu_pair if device.type == "cuda" else time_pair
    pair = time(lambda: step.run(stash), lambda: step.run(None), repeats)
    saved = shape.layers * capacity * sum(shape.row_bytes)
    once = capacity * sum(shape.row_bytes)
    return StepRow(
        case="stash_step",
        what=f"{shape.layers} layers, capacity factor {factor:g}, {imbalance}",
        values=shape.layers,
        target=SLOWER_AT_MOST if device.type == "cuda" else None,
        pair=pair,
        device=device_name(device),
        imbalance=imbalance,
        capacity_factor=factor,
        peak_bytes=None if peak is None else peak + used,
        plain_peak_bytes=plain_peak,
        expected_saving_bytes=saved - once - used,
        stash=str(stash.stats()),
    )


def check_gradients(what: str, ours: Sequence[Tensor], plain: Sequence[Tensor]) -> None:
    """Refuse to time two steps that do not give the same bits.

    Raises:
        RuntimeError: They do not.
    """
    if len(ours) != len(plain) or not all(map(torch.equal, ours, plain)):
        raise RuntimeError(f"{what}: gradients differ with the stash; nothing is timed")


def _peak(step: Step, stash: Stash | None, device: torch.device) -> int | None:
    """Bytes that one step takes beyond what was there before."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step.run(stash)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def show(rows: Sequence[StepRow]) -> None:
    """Print the table, the ratio of the times first."""
    table = Table(title="a step with the stash, against the same without")
    for header in ("ratio", "quartiles", "wanted", "ms", "peak GB", "without", "saved", "formula"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("what")
    for row in rows:
        pair = row.pair
        gained = None
        if row.peak_bytes is not None and row.plain_peak_bytes is not None:
            gained = row.plain_peak_bytes - row.peak_bytes
        table.add_row(
            f"[bold]{pair.ratio:.3f}[/bold]",
            f"{pair.ratio_low:.3f}-{pair.ratio_high:.3f}",
            "" if row.target is None else f"≤ {row.target:.2f}",
            f"{pair.ours_us / 1000:.2f}",
            _gigabytes(row.peak_bytes),
            _gigabytes(row.plain_peak_bytes),
            _gigabytes(gained),
            _gigabytes(row.expected_saving_bytes),
            row.what,
        )
    Console().print(table)


def _gigabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e9:.2f}"
