"""A small model of experts on a GPU, and a step of it that reads tensors that stay in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import backstash as bs

GPU = "cuda"
WIDTH, CAPACITY, EXPERTS, LAYERS = 256, 4096, 8, 6


class Layers(nn.Module):
    """Expert layers on a buffer that is larger than what is valid in it."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(layers))
        self.layers = nn.ModuleList(bs.GroupedMLP(EXPERTS, WIDTH, 128) for _ in range(layers))
        self.to(GPU, torch.bfloat16)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + nn.functional.dropout(layer(norm(x), counts), 0.1)
        return x


class Step:
    """Forward and backward from tensors that stay where they are."""

    def __init__(self, *handlers: Any, recipe: str = "high_precision") -> None:
        self.model = Layers()
        self.handlers = handlers
        self.recipe = bs.recipe(recipe)
        self.x = torch.randn(CAPACITY, WIDTH, device=GPU, dtype=torch.bfloat16)
        self.counts = torch.zeros(EXPERTS, dtype=torch.int32, device=GPU)
        self.row = torch.arange(CAPACITY, device=GPU)
        self.calls = torch.zeros((), device=GPU, dtype=torch.int64)

    def __call__(self) -> Tensor:
        self.calls += 1
        with bs.autocast(recipe=self.recipe), bs.saving(*self.handlers):
            y = self.model(self.x * 1.0, self.counts)
            valid = (self.row < self.counts.sum())[:, None]
            loss = torch.where(valid, y, 0.0).float().square().sum()
        loss.backward()
        return loss.detach()

    def gradients(self, run: Callable[[], Tensor], total: int) -> list[Tensor]:
        """The loss and every gradient of one call of ``run`` with ``total`` valid rows."""
        self.counts.copy_(torch.arange(EXPERTS) * total * 2 // (EXPERTS * (EXPERTS - 1)))
        self.model.zero_grad()
        torch.manual_seed(total)
        loss = run()
        grads = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        return [loss.clone(), *grads]


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
