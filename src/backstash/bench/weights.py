"""What sharded weights cost: a step beside torch's ``fully_shard`` of the same model.

A step is forward and backward of a stack of feed-forward blocks, each rank on tokens of its
own; an optimizer would do the same to both.  The yardstick has the same values in
``torch.nn.Linear`` and is sharded block by block.  Loss and gradients of both are compared
first, and then they take turns, with the same models on whole weights, which send nothing, in
between.

*Exposed* is what a step takes beyond the same step on whole weights: collectives that do not
hide behind a matmul, and whatever else sharding does.  *Alone* is, on a GPU, the time in which
a kernel of NCCL runs and no other, from a profile.  *Peak* is the part of the weights that a
rank holds and what a step takes beyond it.  *Wire* counts what collectives gather and reduce,
once for all ranks, by watching the calls of both.

Processes are those of ``torchrun``, or as many as there are GPUs, or two on a CPU.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from backstash.bench.overlap import Overlap, profile_overlap
from backstash.bench.record import Row
from backstash.bench.timing import pair_of_turns
from backstash.device import default_device, device_name, launch_environment
from backstash.nn import Linear
from backstash.recipes import Operand, Phase, Role, autocast, recipe
from backstash.weights import shard_weights, sharded_weights

#: How the weights travel, the recipe of the layers, and into how few parts of the tokens the step
#: goes: with few tokens there is little to hide a collective behind.
SETTINGS = (
    ("high_precision", "high_precision", 1),
    ("mxfp8", "mxfp8", 1),
    ("float8_current", "float8_current", 1),
    ("high_precision", "high_precision", 8),
    ("mxfp8", "high_precision", 8),
    ("float8_current", "high_precision", 8),
)
CPU_RANKS = 2
TIMEOUT_S = 60
# Roundings to the dtype add up over the sums of a step.
ROUNDINGS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of the model, and how many tokens each rank has."""

    blocks: int
    hidden: int
    ffn: int
    tokens: int
    dtype: torch.dtype


SHAPES: Mapping[str, Shape] = {
    "cpu": Shape(blocks=2, hidden=64, ffn=128, tokens=32, dtype=torch.float32),
    "cuda": Shape(blocks=8, hidden=4096, ffn=16384, tokens=2048, dtype=torch.bfloat16),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """What a step of one of the two takes; times are medians of the slowest rank."""

    step_ms: float
    whole_ms: float
    """The same step on whole weights, without any communication."""
    exposed_ms: float
    overlap: Overlap | None
    part_bytes: int
    peak_bytes: int | None
    wire_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsRow(Row):
    """One row: ``pair`` are the steps, ``values`` the elements of all weights."""

    device: str
    ranks: int
    dtype: str
    blocks: int
    hidden: int
    ffn: int
    tokens: int
    gather: str
    recipe: str
    ours: Cost
    fully_shard: Cost
    errors: Mapping[str, float]
    """Of the loss and the worst gradient: the norm of the difference over the yardstick's."""


class Block(nn.Module):
    """A feed-forward block with a residual, of our layers or of torch's."""

    def __init__(self, linear: Callable[..., nn.Module], shape: Shape, device: Any) -> None:
        super().__init__()
        new = {"bias": False, "device": device, "dtype": shape.dtype}
        self.up = linear(shape.hidden, shape.ffn, **new)
        self.down = linear(shape.ffn, shape.hidden, **new)

    def forward(self, x_TH: Tensor) -> Tensor:
        """Add to each token what the block makes of it."""
        return x_TH + self.down(F.silu(self.up(x_TH)))


class Wire(TorchDispatchMode):
    """Counts the bytes of weights that are gathered and of gradients that are reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in ("c10d::_allgather_base_", "c10d::allgather_into_tensor_coalesced_"):
            self._count(args[0])
        elif name in ("c10d::_reduce_scatter_base_", "c10d::reduce_scatter_tensor_coalesced_"):
            self._count(args[1])
        return func(*args, **(kwargs or {}))

    def _count(self, whole: Any) -> None:
        wholes = [whole] if isinstance(whole, Tensor) else whole
        self.bytes += sum(w.nbytes for w in wholes)


class Contest:
    """The model sharded by us and by torch, both on whole weights, and this rank's tokens."""

    def __init__(
        self, gather: str, shape: Shape, device: torch.device, recipe_name: str | None = None
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        self.gather, self.shape, self.device = gather, shape, device
        self.recipe = recipe(recipe_name or gather)
        self.whole = _stack(Linear, shape, device)
        self.plain = _stack(nn.Linear, shape, device)
        with torch.no_grad():
            for p, q in zip(self.plain.parameters(), self.whole.parameters(), strict=True):
                p.copy_(q)
        self.values = sum(p.numel() for p in self.plain.parameters())
        self.ours = copy.deepcopy(self.whole)
        self.sharding = shard_weights(self.ours, gather=gather)
        self.theirs: Any = copy.deepcopy(self.plain)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in self.theirs:
            fully_shard(block, mesh=mesh)
        fully_shard(self.theirs, mesh=mesh)
        torch.manual_seed(1000 + dist.get_rank())
        self.x_TH = torch.randn(shape.tokens, shape.hidden, device=device, dtype=shape.dtype)
        # As behind an embedding: otherwise backward does not need the first weight.
        self.x_TH.requires_grad_()

    def step(self, model: nn.Module) -> Tensor:
        """Forward and backward; gradients are left where they go."""
        model.zero_grad()
        self.x_TH.grad = None
        quantized = model is self.ours or model is self.whole
        with autocast(recipe=self.recipe) if quantized else contextlib.nullcontext():
            loss = model(self.x_TH).float().square().mean()
        loss.backward()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return loss.detach()

    def check_outputs(self) -> dict[str, float]:
        """Compare a step of both.

        Raises:
            RuntimeError: They differ by more than the recipe's formats allow.
        """
        ours, theirs = self.step(self.ours), self.step(self.theirs)
        errors = {"loss": relative_error(ours, theirs), "gradient": 0.0}
        weights = sharded_weights(self.ours).values()
        for mine, yardstick in zip(weights, self.theirs.parameters(), strict=True):
            wanted = mine.cut.shard(yardstick.grad.full_tensor(), self.sharding.channel.rank)
            error = relative_error(mine.grad, wanted)  # pyright: ignore[reportArgumentType]
            errors["gradient"] = max(errors["gradient"], error)
        worst = torch.tensor(list(errors.values()))
        dist.all_reduce(worst, dist.ReduceOp.MAX)  # so that all ranks raise, or none
        errors = dict(zip(errors, worst.tolist(), strict=True))
        allowed = self.tolerance()
        for name, error in errors.items():
            if not error <= allowed:
                raise RuntimeError(
                    f"the {name} with weights gathered in {self.gather} differs from fully_shard's "
                    f"by {error:.1e}, allowed are {allowed:.1e}; nothing is timed"
                )
        return errors

    def tolerance(self) -> float:
        """How far a step may be from the yardstick: the formats' tolerance, and the dtype's."""
        roles = [Role(operand, phase, "Linear") for operand in Operand for phase in Phase]
        recipes = self.recipe, recipe(self.gather)
        formats = max(recipe.format(role).rtol for recipe in recipes for role in roles)
        return formats + ROUNDINGS * torch.finfo(self.shape.dtype).eps

    def turns(self, repeats: int) -> list[list[float]]:
        """Milliseconds of a step of ours, theirs, ours on whole weights, theirs on such."""
        models = [self.ours, self.theirs, self.whole, self.plain]
        turns = []
        for turn in range(repeats + 2):
            times = [0.0] * len(models)
            for place in range(len(models)):
                i = (turn + place) % len(models)
                _meet()
                start = time.perf_counter_ns()
                self.step(models[i])
                times[i] = (time.perf_counter_ns() - start) / 1e6
            turns.append(times)
        slowest = torch.tensor(turns[2:])  # the first two warm up
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.tolist()

    def cost(self, model: nn.Module, step_ms: Sequence[float], whole_ms: Sequence[float]) -> Cost:
        """Times from the turns, and what one more step sends and holds."""
        with Wire() as wire:
            self.step(model)
        _meet()
        on_gpu = self.device.type == "cuda"
        overlap = profile_overlap(lambda: self.step(model)) if on_gpu else None
        model.zero_grad()
        part_bytes = sum(_local(p).nbytes for p in model.parameters())
        extra = self._extra_bytes(model)
        beyond = [step - whole for step, whole in zip(step_ms, whole_ms, strict=True)]
        return Cost(
            step_ms=statistics.median(step_ms),
            whole_ms=statistics.median(whole_ms),
            exposed_ms=statistics.median(beyond),
            overlap=overlap,
            part_bytes=part_bytes,
            peak_bytes=None if extra is None else part_bytes + extra,
            # A group of one calls collectives, and nothing goes over a wire.
            wire_bytes=wire.bytes if dist.get_world_size() > 1 else 0,
        )

    def _extra_bytes(self, model: nn.Module) -> int | None:
        if self.device.type != "cuda":
            return None
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.step(model)
        return torch.cuda.max_memory_allocated(self.device) - before


def measure(repeats: int) -> list[WeightsRow]:
    """Measure every way to gather; the rows are on rank 0, the other ranks have none."""
    if dist.is_initialized():
        return measure_rank(default_device(), repeats)
    launch = launch_environment()
    if launch.world_size > 1:
        return _join(launch.rank, launch.world_size, "env://", repeats)
    ranks = torch.cuda.device_count() or CPU_RANKS
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_start, (ranks, folder, repeats), nprocs=ranks)  # pyright: ignore
        return pickle.loads((Path(folder) / "rows").read_bytes())


def measure_rank(device: torch.device, repeats: int) -> list[WeightsRow]:
    """Measure on this rank, whose process group is there."""
    shape = SHAPES[device.type]
    rows = []
    for gather, name, parts in SETTINGS:
        fewer = dataclasses.replace(shape, tokens=shape.tokens // parts)
        rows.append(measure_contest(Contest(gather, fewer, device, name), repeats))
    return rows if dist.get_rank() == 0 else []


def measure_contest(contest: Contest, repeats: int) -> WeightsRow:
    """Compare, then time, then count bytes."""
    gather, shape = contest.gather, contest.shape
    errors = contest.check_outputs()
    turns = contest.turns(repeats)
    ours, theirs, whole, plain = zip(*turns, strict=True)
    pairs = zip(ours, theirs, strict=True)
    return WeightsRow(
        case="weights",
        what=f"{dist.get_world_size()} ranks, gather in {gather}",
        values=contest.values,
        target=None,
        pair=pair_of_turns([(mine * 1000, other * 1000) for mine, other in pairs]),
        device=device_name(contest.device),
        ranks=dist.get_world_size(),
        dtype=str(shape.dtype).removeprefix("torch."),
        blocks=shape.blocks,
        hidden=shape.hidden,
        ffn=shape.ffn,
        tokens=shape.tokens,
        gather=gather,
        recipe=contest.recipe.name,
        ours=contest.cost(contest.ours, ours, whole),
        fully_shard=contest.cost(contest.theirs, theirs, plain),
        errors=errors,
    )


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """The norm of the difference over that of the yardstick; NaN where anything is NaN."""
    difference = torch.linalg.vector_norm(ours.float() - theirs.float())
    return (difference / torch.linalg.vector_norm(theirs.float()).clamp(min=1e-30)).item()


def show(rows: list[WeightsRow]) -> None:
    """Print the table, the ratio first; nothing on ranks that have no rows."""
    if not rows:
        return
    first = rows[0]
    table = Table(
        title=f"a step with sharded weights, {first.ranks} x {first.device}, beside fully_shard",
        caption="second lines: quartiles of the ratio, fully_shard",
    )
    for header in ("ratio", "step\nms", "exposed\nms", "alone\nms", "peak\nMB", "wire B\n/value"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("gather")
    table.add_column("layers in")
    table.add_column("tokens", justify="right")
    for row in rows:
        pair, both = row.pair, (row.ours, row.fully_shard)
        table.add_row(
            f"[bold]{pair.ratio:.2f}[/bold]\n{pair.ratio_low:.2f}-{pair.ratio_high:.2f}",
            "\n".join(f"{cost.step_ms:.2f}" for cost in both),
            "\n".join(f"{cost.exposed_ms:.2f}" for cost in both),
            "\n".join("-" if c.overlap is None else f"{c.overlap.alone_ms:.2f}" for c in both),
            "\n".join("-" if c.peak_bytes is None else f"{c.peak_bytes / 1e6:.0f}" for c in both),
            "\n".join(f"{cost.wire_bytes / row.values:.2f}" for cost in both),
            row.gather,
            row.recipe,
            str(row.tokens),
        )
    Console().print(table)


def _stack(linear: Callable[..., nn.Module], shape: Shape, device: torch.device) -> nn.Sequential:
    return nn.Sequential(*(Block(linear, shape, device) for _ in range(shape.blocks)))


def _local(parameter: Any) -> Tensor:
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()


def _meet() -> None:
    """Wait for all ranks, on the host."""
    dist.all_reduce(torch.zeros(1))


def _start(rank: int, ranks: int, folder: str, repeats: int) -> None:
    rows = _join(rank, ranks, f"file://{folder}/store", repeats)
    if rank == 0:
        (Path(folder) / "rows").write_bytes(pickle.dumps(rows))


def _join(rank: int, ranks: int, where: str, repeats: int) -> list[WeightsRow]:
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device, backend = (
            torch.device("cuda", rank % torch.cuda.device_count()),
            "cpu:gloo,cuda:nccl",
        )
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=where,
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    try:
        return measure_rank(device, repeats)
    finally:
        dist.destroy_process_group()
