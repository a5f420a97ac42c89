"""What the stash does to a whole step: ``backstash bench stash_step``.

Some layers of experts, one after the other, each with the buffers of one rank of an
expert-parallel group: a capacity of so many times an even load.  The same step is run with the
stash and without, as it is and, on a GPU, as a CUDA graph.  Loss and gradients are compared
first, bit for bit, with torch told to raise on everything that waits for the GPU.  Then both are
timed in turns, and their peaks are measured, beside what the formula says of the stash's: *the
plain one, less the saved buffers of all layers, plus the pages that were used*.  Experts compute
in pages what they save, so no layer's buffers are there as a whole.  The plain step has three
moments of which one can be the stash's peak: the layers run forward, the loss runs backward, the
layers run backward.  In the last the gradient of a pre-activation takes the place of that, which it
cannot in pages, so one gradient comes on top.

Where an imbalance changes from step to step, both are given the same load in each turn.

Letters: T tokens, K experts a token, H features, I features inside an expert, E experts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from backstash.bench.choice import chosen
from backstash.bench.record import Row
from backstash.bench.timing import Pair, time_gpu_turns, time_pair
from backstash.bench.workloads import IMBALANCES, Load, ScriptedRouter, router_choices
from backstash.device import default_device, device_name
from backstash.kernels.reference.slabs import SLAB_ROWS
from backstash.moe import Local, MoE
from backstash.saving import saving
from backstash.stash import PagePool, Stash, pages_for

SLOWER_AT_MOST = 1.02
PAGE_BYTES = 1 << 16
FACTORS = (2.0, 4.0)
#: A step as it is, and as a graph where there are graphs.
MODES: Mapping[str, tuple[str, ...]] = {"cpu": ("eager",), "cuda": ("eager", "captured")}
#: Steps after which a load that changes begins anew.
STEPS = 4


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
    def input_bytes(self) -> int:
        """Bytes of a row of the experts' input."""
        return self.hidden * self.dtype.itemsize

    @property
    def preactivation_bytes(self) -> int:
        """Bytes of a row of the pre-activation."""
        return 2 * self.ffn * self.dtype.itemsize

    def pages(self, factor: float) -> int:
        """Pages of one layer at most: its buffers, and its routing weights of four bytes a row.

        Where experts write them into pages, each begins with a page of its own.
        """
        rows = self.capacity(factor) + SLAB_ROWS * len(self.load.experts_of(0))
        widths = self.input_bytes, self.preactivation_bytes, 4
        return pages_for([(rows, width) for width in widths], PAGE_BYTES)


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
        load=Load(tokens=65536, experts=128, top_k=8, ranks=8),
        hidden=2048,
        ffn=768,
        dtype=torch.bfloat16,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRow(Row):
    """One row: ``values`` layers; ``pair`` with the stash and without."""

    device: str
    mode: str
    imbalance: str
    capacity_factor: float
    peak_bytes: int | None
    plain_peak_bytes: int | None
    expected_peak_bytes: int | None
    stash: str

    @property
    def of_formula(self) -> float | None:
        """The peak over what the formula says."""
        if self.peak_bytes is None or self.expected_peak_bytes is None:
            return None
        return self.peak_bytes / self.expected_peak_bytes


class Step(nn.Module):
    """Forward and backward of all layers from inputs that stay where they are."""

    def __init__(self, shape: Shape, factor: float, imbalance: str, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        # The last rank has none where a rank is idle, the first is the hot one.
        rank = shape.load.ranks - 1 if imbalance == "idle_rank" else 0
        dispatcher = Local(capacity_factor=factor, keep_experts=shape.load.experts_of(rank))
        new = {"device": device, "dtype": shape.dtype}
        choices = router_choices(IMBALANCES[imbalance], shape.load, steps=STEPS)
        self.script = itertools.cycle([choice.to(device) for choice in choices])
        self.choice = next(self.script).clone()
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
            ScriptedRouter(layer, [self.choice])
            self.layers.append(layer)
        self.x = torch.randn(shape.load.tokens, shape.hidden, **new).requires_grad_()
        self.stash: Stash | None = None
        self.note: Callable[[], object] | None = None

    def advance(self) -> None:
        """Go on to the load of the next step."""
        self.choice.copy_(next(self.script))

    def forward(self) -> list[Tensor]:
        """The loss and the gradients of input and weights.

        ``note`` is called when the layers ran forward, and when the loss ran backward.
        """
        with saving(*([self.stash] if self.stash else [])):
            x = self.x
            for norm, layer in zip(self.norms, self.layers, strict=True):
                x = x + layer(norm(x))
            if self.note is not None:
                note = self.note
                note()
                x.register_hook(lambda _: note())
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


class Peaks(NamedTuple):
    """Bytes that a step takes at most beyond what was there before it, in each of its parts."""

    forward: int
    """While the layers run forward."""
    loss: int
    """While the loss does, and runs backward."""
    backward: int
    """While the layers run backward."""

    def with_stash(self, shape: Shape, factor: float, used: int) -> int:
        """What the formula makes of a step without a stash, with ``used`` bytes of pages."""
        rows = shape.capacity(factor)
        saved = shape.layers * rows * (shape.input_bytes + shape.preactivation_bytes)
        backward = self.backward + rows * shape.preactivation_bytes
        return max(self.forward, self.loss, backward) - saved + used


@dataclasses.dataclass(frozen=True)
class _Case:
    """What one row is measured of."""

    shape: Shape
    factor: float
    imbalance: str
    mode: str

    @property
    def what(self) -> str:
        """The name of the row."""
        layers, factor = self.shape.layers, f"capacity factor {self.factor:g}"
        return f"{layers} layers, {factor}, {self.imbalance}, {self.mode}"


def measure(repeats: int, only: Sequence[str] = ()) -> Iterator[StepRow]:
    """Compare, then time every imbalance at every capacity factor, or the rows that are chosen.

    Raises:
        ConfigError: No row's name contains one of the texts of ``only``.
        RuntimeError: Gradients differ in a bit, or something waits for the GPU; nothing is timed.
    """
    device = default_device()
    shape, modes = SHAPES[device.type], MODES[device.type]
    everything = itertools.product(FACTORS, IMBALANCES, modes)
    cases = [_Case(shape, *names) for names in everything]
    wanted = chosen([case.what for case in cases], only)
    # A step is made once for both modes.
    steps = itertools.groupby(
        [case for case in cases if case.what in wanted], lambda case: (case.factor, case.imbalance)
    )
    return (row for _, some in steps for row in _measure(list(some), repeats, device))


def _measure(cases: Sequence[_Case], repeats: int, device: torch.device) -> Iterator[StepRow]:
    """The rows of one step, as it is and as a graph."""
    shape, factor, imbalance = cases[0].shape, cases[0].factor, cases[0].imbalance
    step = Step(shape, factor, imbalance, device)
    stash = _warm_stash(step, shape.layers * shape.pages(factor))
    for case in cases:
        kind = _Captured if case.mode == "captured" else _Eager
        ours, theirs = kind(step, stash), kind(step, None)
        for _ in range(STEPS):
            check_gradients(imbalance, ours.run(), theirs.run())
            step.advance()
        used = stash.stats().device_high * PAGE_BYTES
        time = time_gpu_turns if device.type == "cuda" else _time_on_cpu
        pair = time(ours.run, theirs.run, repeats, step.advance)
        plain = theirs.peaks
        yield StepRow(
            case="stash_step",
            what=case.what,
            values=shape.layers,
            target=SLOWER_AT_MOST if device.type == "cuda" else None,
            pair=pair,
            device=device_name(device),
            mode=case.mode,
            imbalance=imbalance,
            capacity_factor=factor,
            peak_bytes=None if ours.peaks is None else max(ours.peaks) + used,
            plain_peak_bytes=None if plain is None else max(plain),
            expected_peak_bytes=None if plain is None else plain.with_stash(shape, factor, used),
            stash=str(stash.stats()),
        )


def _warm_stash(step: Step, pages: int) -> Stash:
    """A stash that has seen the step, in as many pages as the worst case takes.

    With those nothing is kept back while counters are under way.  What the pool itself takes is
    no part of the peaks, the pages that were in use are.
    """
    pool = PagePool(pages * PAGE_BYTES, device=step.x.device, page_bytes=PAGE_BYTES)
    stash = Stash(pool)
    step.run(stash)  # compiles
    # In new memory the most pages in use are those of the steps from here on.
    pool.grow((pages + 1) * PAGE_BYTES)
    step.run(stash)  # as all later steps will
    return stash


def _time_on_cpu(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    repeats: int,
    between: Callable[[], object],
) -> Pair:
    return time_pair(ours, theirs, repeats)


class _Eager:
    """A step run as it is, and the bytes that it takes beyond what was there before."""

    def __init__(self, step: Step, stash: Stash | None) -> None:
        self.step, self.stash = step, stash
        self.peaks = _peaks_of(step, self.run)

    def run(self) -> list[Tensor]:
        with no_waiting(self.step.x.device):
            return self.step.run(self.stash)


class _Captured:
    """The same as a CUDA graph, whose memory is taken once, when it is captured."""

    def __init__(self, step: Step, stash: Stash | None) -> None:
        self.graph, self.outputs = torch.cuda.CUDAGraph(), []
        self.peaks = _peaks_of(step, lambda: self._capture(step, stash))

    def _capture(self, step: Step, stash: Stash | None) -> None:
        with torch.cuda.graph(self.graph):
            self.outputs = step.run(stash)

    def run(self) -> list[Tensor]:
        self.graph.replay()
        return self.outputs


def _peaks_of(step: Step, run: Callable[[], object]) -> Peaks | None:
    """Bytes that a step takes beyond what was there before; nothing on a CPU."""
    if step.x.device.type != "cuda":
        run()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, peaks = torch.cuda.memory_allocated(), []

    def note() -> None:
        peaks.append(torch.cuda.max_memory_allocated() - before)
        torch.cuda.reset_peak_memory_stats()

    step.note = note
    try:
        run()
    finally:
        step.note = None
    note()
    return Peaks(*peaks)


@contextlib.contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Let torch raise on everything that waits for the GPU; on a CPU do nothing."""
    if device.type != "cuda":
        yield
        return
    with warnings.catch_warnings():
        # Torch calls the mode a prototype each time it is set.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_gradients(what: str, ours: Sequence[Tensor], plain: Sequence[Tensor]) -> None:
    """Refuse to time two steps that do not give the same bits.

    Raises:
        RuntimeError: They do not.
    """
    if len(ours) != len(plain) or not all(map(torch.equal, ours, plain)):
        raise RuntimeError(f"{what}: gradients differ with the stash; nothing is timed")


def show(rows: Sequence[StepRow]) -> None:
    """Print the table, the ratio of the times first."""
    table = Table(title="a step with the stash, against the same without")
    for header in ("ratio", "quartiles", "wanted", "ms", "peak GB", "without", "of formula"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("what")
    for row in rows:
        pair, of_formula = row.pair, row.of_formula
        table.add_row(
            f"[bold]{pair.ratio:.3f}[/bold]",
            f"{pair.ratio_low:.3f}-{pair.ratio_high:.3f}",
            "" if row.target is None else f"≤ {row.target:.2f}",
            f"{pair.ours_us / 1000:.2f}",
            _gigabytes(row.peak_bytes),
            _gigabytes(row.plain_peak_bytes),
            "" if of_formula is None else f"{of_formula:.3f}",
            row.what,
        )
    Console(width=140).print(table)


def _gigabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e9:.2f}"
