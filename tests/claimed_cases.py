"""Layers of experts that compute in pages what they save, small enough for a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import backstash as bs
from backstash.stash import PagePool, Stash
from stash_cases import Copying

LAYERS, SLOTS = 3, 2  # input and pre-activation
TOKENS = 200


class Claiming(Copying):
    """The same, for values that are computed in pages."""

    def __init__(self, kept: Stash) -> None:
        super().__init__(kept)
        self.claim = kept.claim


class Experts:
    """Layers of a Mixture of Experts on buffers of one rank."""

    def __init__(
        self, device: str, *, recipe: str = "high_precision", keep: Any = range(4), **options: Any
    ) -> None:
        torch.manual_seed(0)
        is_gpu = device == "cuda"
        self.page_bytes = 65536 if is_gpu else 512
        self.recipe = bs.recipe(recipe)
        hidden, ffn = (512, 256) if is_gpu else (16, 8)
        dispatcher = bs.Local(capacity_factor=2.0, keep_experts=keep)
        new = {"device": device, "dtype": torch.bfloat16 if is_gpu else torch.float32}
        self.layers = torch.nn.ModuleList(
            bs.MoE(hidden, ffn, 8, 2, dispatcher=dispatcher, **new, **options)
            for _ in range(LAYERS)
        )
        self.x = torch.randn(TOKENS, hidden, **new).requires_grad_()

    def stash(self, pages: int = 4096, host_pages: int = 0, **options: Any) -> Stash:
        sizes = pages * self.page_bytes, host_pages * self.page_bytes
        pool = PagePool(*sizes, device=self.x.device, page_bytes=self.page_bytes)
        return Stash(pool, **options)

    def loss(self, *handlers: Any) -> Tensor:
        with bs.saving(*handlers):
            return self.loss_here()

    def loss_here(self) -> Tensor:
        with bs.autocast(recipe=self.recipe):
            x = self.x
            for layer in self.layers:
                x = x + layer(x)
            return x.float().square().sum()

    def gradients(self, loss: Tensor, *, retain_graph: bool = False) -> list[Tensor]:
        inputs = [self.x, *self.layers.parameters()]
        grads = torch.autograd.grad(loss, inputs, allow_unused=True, retain_graph=retain_graph)
        return [loss.detach(), *(grad for grad in grads if grad is not None)]


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
