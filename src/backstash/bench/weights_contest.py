"""Two models that take the same step, sharded by us and by torch's ``fully_shard``.

Loss and gradients are compared before anything is timed.  Then the two take turns with the
same models on whole weights, which send nothing, so that what sharding costs can be told from
what the layers do.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from backstash.bench.overlap import Overlap, profile_overlap
from backstash.nn import Linear
from backstash.recipes import Operand, Phase, Role, autocast, recipe
from backstash.weights import ShardOptions, shard_weights, sharded_weights

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
class Setting:
    """How the weights travel, and what there is to do meanwhile.

    Attributes:
        gather: The recipe in whose format for weights they travel.
        recipe: That of the layers.
        parts: Into how few parts of the tokens a step goes: with few of them there is little
            to hide a collective behind.
        carrier: What brings the parts together.
    """

    gather: str = "high_precision"
    recipe: str = "high_precision"
    parts: int = 1
    carrier: str = "collective"


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
    """Counts the bytes of weights that collectives gather and of gradients that they reduce."""

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

    def __init__(self, setting: Setting, shape: Shape, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        self.setting, self.device = setting, device
        self.shape = shape = dataclasses.replace(shape, tokens=shape.tokens // setting.parts)
        self.recipe = recipe(setting.recipe)
        self.whole = _stack(Linear, shape, device)
        self.plain = _stack(nn.Linear, shape, device)
        with torch.no_grad():
            for p, q in zip(self.plain.parameters(), self.whole.parameters(), strict=True):
                p.copy_(q)
        self.values = sum(p.numel() for p in self.plain.parameters())
        self.ours = copy.deepcopy(self.whole)
        options = ShardOptions(carrier=setting.carrier)
        self.sharding = shard_weights(self.ours, gather=setting.gather, options=options)
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
                    f"the {name} with {self.setting} differs from fully_shard's "
                    f"by {error:.1e}, allowed are {allowed:.1e}; nothing is timed"
                )
        return errors

    def tolerance(self) -> float:
        """How far a step may be from the yardstick: the formats' tolerance, and the dtype's."""
        roles = [Role(operand, phase, "Linear") for operand in Operand for phase in Phase]
        recipes = self.recipe, recipe(self.setting.gather)
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
                meet()
                start = time.perf_counter_ns()
                self.step(models[i])
                times[i] = (time.perf_counter_ns() - start) / 1e6
            turns.append(times)
        slowest = torch.tensor(turns[2:])  # the first two warm up
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.tolist()

    def cost(self, model: nn.Module, step_ms: Sequence[float], whole_ms: Sequence[float]) -> Cost:
        """Times from the turns, and what one more step sends and holds."""
        before = self.sharding.wire_bytes
        with Wire() as wire:
            self.step(model)
        # Copies between GPUs are no calls of a collective, and only we count them.
        wire_bytes = self.sharding.wire_bytes - before if model is self.ours else wire.bytes
        meet()
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
            wire_bytes=wire_bytes if dist.get_world_size() > 1 else 0,
        )

    def _extra_bytes(self, model: nn.Module) -> int | None:
        if self.device.type != "cuda":
            return None
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.step(model)
        return torch.cuda.max_memory_allocated(self.device) - before


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """The norm of the difference over that of the yardstick; NaN where anything is NaN."""
    difference = torch.linalg.vector_norm(ours.float() - theirs.float())
    return (difference / torch.linalg.vector_norm(theirs.float()).clamp(min=1e-30)).item()


def _stack(linear: Callable[..., nn.Module], shape: Shape, device: torch.device) -> nn.Sequential:
    return nn.Sequential(*(Block(linear, shape, device) for _ in range(shape.blocks)))


def _local(parameter: Any) -> Tensor:
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()


def meet() -> None:
    """Wait for all ranks, on the host."""
    dist.all_reduce(torch.zeros(1))
