"""A model and its sharded twin, trained side by side on the same numbers.

The whole model sees the batches of all ranks one after the other and divides its gradients;
each rank's sharded model sees one of them.  With two ranks the additions are the same, so the
bits are.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from backstash.nn import Linear
from backstash.recipes import autocast
from backstash.weights import ShardedWeight, Sharding, sharded_weights
from nn_cases import Case

H = 12
ADAM = functools.partial(torch.optim.AdamW, lr=1e-2)
SGD = functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
Step = Callable[[nn.Module, int], None]


class Stack(nn.Module):
    """Layers one after another, each of which may be skipped."""

    def __init__(
        self, layers: int = 3, features: int = H, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Linear(features, features, dtype=dtype) for _ in range(layers))

    def forward(self, x: Tensor, order: Any = None) -> Tensor:
        for index in range(len(self.layers)) if order is None else order:
            x = x + self.layers[index](x).tanh()
        return x


def stack_step(model: nn.Module, batch: int, order: Any = None) -> None:
    """Forward and backward of a :class:`Stack` on one batch."""
    torch.manual_seed(1000 + batch)
    features = model.layers[0].in_features  # pyright: ignore
    x = torch.randn(5, features, dtype=next(model.parameters()).dtype)
    model(x, order).square().sum().backward()


def case_step(case: Case, recipe: Any) -> Step:
    """Forward and backward of one of the layers."""

    def step(model: nn.Module, batch: int) -> None:
        inputs = case.inputs()
        with autocast(recipe=recipe):
            y = case.call(model, *inputs)
        torch.manual_seed(1000 + batch)
        y.backward(torch.randn_like(y) / 8)

    return step


def train_twins(
    twin: nn.Module,
    model: nn.Module,
    step: Step,
    optimizer: Callable[..., torch.optim.Optimizer],
    *,
    same_data: bool = False,
) -> None:
    """Five optimizer steps of both, each rank of the sharded model on a batch of its own."""
    channel = next(iter(sharded_weights(model).values())).sharding.channel
    whole, parts = optimizer(twin.parameters()), optimizer(model.parameters())
    for number in range(5):
        batches = (
            [number] if same_data else [number * channel.size + r for r in range(channel.size)]
        )
        whole.zero_grad()
        for batch in batches:
            step(twin, batch)
        for p in twin.parameters():
            if p.grad is not None:
                p.grad /= len(batches)
        whole.step()
        parts.zero_grad()
        step(model, batches[0] if same_data else batches[channel.rank])
        parts.step()


def pairs(twin: nn.Module, model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """What a parameter must be here, and what it is."""
    found = {}
    for (name, whole), mine in zip(twin.named_parameters(), model.parameters(), strict=True):
        wanted = whole
        if isinstance(mine, ShardedWeight):
            wanted = mine.cut.shard(whole.detach(), mine.sharding.channel.rank)
        found[name] = (wanted.detach(), mine.data)
    return found


def differing(twin: nn.Module, model: nn.Module) -> list[str]:
    """Names of parameters that are not bit-equal to the twin's."""
    return [name for name, (a, b) in pairs(twin, model).items() if not torch.equal(a, b)]


def assert_close(twin: nn.Module, model: nn.Module) -> None:
    """Equal but for the order of additions."""
    for wanted, came in pairs(twin, model).values():
        torch.testing.assert_close(came, wanted)


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def nothing_is_lent(sharding: Sharding) -> bool:
    """Whether all gathered memory has gone back; gloo's own thread may hold it a moment longer."""
    deadline = time.monotonic() + 5
    while sharding.lent_bytes and time.monotonic() < deadline:
        time.sleep(0.001)
    return sharding.lent_bytes == 0
