"""The layers at awkward sizes, the ways in which saved tensors travel, and a fake shard.

Shared by the tests of ``backstash.nn``.  Sizes are no multiple of any format's block; the
groups are one that is larger than the rest, an empty one, one of a single row, and a tail.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backstash import kernels
from backstash.nn import (
    GroupedLinear,
    GroupedMLP,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RowMap,
)
from backstash.recipes import autocast, recipe_names

ROWS, TAIL, H, N, FFN = 37, 3, 20, 14, 18
COUNTS = [5, 0, 31, 1]
G = len(COUNTS)
RECIPES = recipe_names()
LOW_PRECISION = tuple(name for name in RECIPES if name != "high_precision")


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer, and what it is called with besides ``x``."""

    name: str
    build: Callable[..., Any]
    arguments: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    rows: int = ROWS

    def make(self, **options: Any) -> Any:
        torch.manual_seed(1)
        return self.build(**options)

    def inputs(self) -> list[Tensor]:
        """Fresh leaves: x first, then other differentiable arguments."""
        torch.manual_seed(2)
        (arguments, _) = self.arguments()
        x = torch.randn(self.rows, H)
        return [x.requires_grad_()] + [
            a.clone().requires_grad_()
            for a in arguments
            if isinstance(a, Tensor) and a.is_floating_point()
        ]

    def call(self, module: Any, *inputs: Tensor) -> Tensor:
        arguments, keywords = self.arguments()
        x, *others = inputs
        floats = iter(others)
        given = [
            next(floats) if isinstance(a, Tensor) and a.is_floating_point() else a
            for a in arguments
        ]
        y = module(x, *given, **keywords)
        return torch.cat(y, dim=-1) if isinstance(y, tuple) else y


def _none() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (), {}


def _counts() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (COUNTS,), {}


def _weighted() -> tuple[tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(3)
    return (COUNTS, torch.rand(ROWS + TAIL)), {}


def routing() -> tuple[RowMap, Tensor]:
    """Seven tokens sent to two of G experts each, one expert left out."""
    torch.manual_seed(4)
    expert_TK = torch.stack([torch.tensor([0, 2, 3])[torch.randperm(3)[:2]] for _ in range(7)])
    source_R, slots_TK, counts_G = kernels.sort_by_expert(expert_TK, G)
    return RowMap(source_R, slots_TK), counts_G


def _routed() -> tuple[tuple[Any, ...], dict[str, Any]]:
    rows, counts_G = routing()
    torch.manual_seed(3)
    return (counts_G, torch.rand(rows.rows)), {"rows": rows}


def _with_biases(**options: Any) -> GroupedMLP:
    return GroupedMLP(G, H, FFN, **{"bias": True, **options})


CASES = [
    Case("Linear", lambda **o: Linear(H, N, **o), _none),
    Case("LayerNormLinear", lambda **o: LayerNormLinear(H, N, **o), _none),
    Case(
        "RMSNormLinear-and-output",
        lambda **o: LayerNormLinear(
            H, N, normalization="RMSNorm", return_layernorm_output=True, **o
        ),
        _none,
    ),
    Case("LayerNormMLP", lambda **o: LayerNormMLP(H, FFN, activation="swiglu", **o), _none),
    Case("GroupedLinear", lambda **o: GroupedLinear(G, H, N, **o), _counts, ROWS + TAIL),
    Case("GroupedMLP", lambda **o: GroupedMLP(G, H, FFN, **o), _counts, ROWS + TAIL),
    Case(
        "GroupedMLP-weighted",
        _with_biases,
        _weighted,
        ROWS + TAIL,
    ),
    Case(
        "GroupedMLP-routed", lambda **o: GroupedMLP(G, H, FFN, activation="gelu", **o), _routed, 7
    ),
]
CASE_NAMES = [case.name for case in CASES]
WEIGHTS = ("weight", "fc1_weight", "fc2_weight")


def weights_of(module: nn.Module) -> dict[str, Any]:
    """The parameters that a matmul reads."""
    return {name: p for name, p in module.named_parameters() if name in WEIGHTS}


def run(case: Case, module: Any, recipe: str = "high_precision", way: str = "no hook") -> list[Any]:
    """Outputs and every gradient of one step: y, inputs', then parameters'."""
    inputs = case.inputs()
    module.zero_grad()
    hooks, through = WAYS[way]
    with autocast(recipe=recipe), hooks():
        y = through(lambda *given: case.call(module, *given), *inputs)
    torch.manual_seed(5)
    y.backward(torch.randn_like(y) / 8)
    return [y.detach(), *(x.grad for x in inputs), *(p.grad for p in module.parameters())]


def _plainly(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return function(*inputs)


def _checkpointed(use_reentrant: bool) -> Callable[..., Tensor]:
    def through(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        result = checkpoint(function, *inputs, use_reentrant=use_reentrant)
        assert isinstance(result, Tensor)
        return result

    return through


def _twice_checkpointed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    inner = _checkpointed(use_reentrant=False)
    return inner(lambda *given: inner(function, *given), *inputs)


def _hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Callable[[], Any]:
    return lambda: torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


@contextlib.contextmanager
def _nested() -> Any:
    with torch.autograd.graph.save_on_cpu(), _hooks(_same, _copy)():
        yield


#: How saved tensors travel: hooks around forward, and what forward runs through.
WAYS: dict[str, tuple[Callable[[], Any], Callable[..., Tensor]]] = {
    "no hook": (contextlib.nullcontext, _plainly),
    "identity": (_hooks(_same, _same), _plainly),
    "detached copies": (_hooks(_copy, _copy), _plainly),
    "save_on_cpu": (torch.autograd.graph.save_on_cpu, _plainly),
    "nested hooks": (_nested, _plainly),
    "checkpoint": (contextlib.nullcontext, _checkpointed(use_reentrant=False)),
    "checkpoint reentrant": (contextlib.nullcontext, _checkpointed(use_reentrant=True)),
    "nested checkpoints": (contextlib.nullcontext, _twice_checkpointed),
}

FORWARD_SCALE, BACKWARD_SCALE = 2.0, 4.0


class Shard(nn.Parameter):
    """A distributed weight of one process: twice itself in forward, four times in backward.

    Both are powers of two, so every product comes out scaled and otherwise bit for bit.
    """

    is_distributed_weight = True

    def listen(self) -> Shard:
        self.asked: list[str] = []
        self.main_grad = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return self

    def materialize_group_for_forward(self) -> Tensor:
        self.asked.append("forward")
        return self.detach() * FORWARD_SCALE

    def materialize_group_for_backward(self) -> list[Tensor]:
        self.asked.append("backward")
        return [self.detach() * BACKWARD_SCALE]

    def finalize_group_grads(self, wgrads: Tensor) -> Tensor | None:
        self.asked.append("finalize")
        self.main_grad.add_(wgrads)
        return wgrads

    def grad_buffer(self) -> Tensor:
        self.asked.append("grad_buffer")
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def shard(module: nn.Module) -> list[Shard]:
    """Replace the weights of a module by fake shards of the same values."""
    shards = []
    for name, weight in weights_of(module).items():
        shards.append(Shard(weight.detach().clone()).listen())
        setattr(module, name, shards[-1])
    return shards
