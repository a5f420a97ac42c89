"""Delayed scaling by its definition, and a small model that takes steps with it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import backstash as bs
from backstash.nn.module import scaling_state

L = 4


class Definition:
    """The rule of one scale, on lists of float32 numbers."""

    def __init__(self, format: Any) -> None:
        self.format = format
        self.history = [np.float32(0)] * format.history
        self.scale = np.float32(1)

    def step(self, amax: float) -> None:
        last = max(self.history[0], np.float32(amax))
        if last == 0:
            return
        seen = [*self.history[1:], last]
        largest = last if self.format.most_recent else max(seen)
        self.history = [np.float32(0), *seen[1:]]
        if np.isfinite(largest):
            wanted = np.float32(self.format.code.largest * 2.0**-self.format.margin)
            with np.errstate(over="ignore"):
                scale = wanted / largest
            self.scale = min(scale, np.finfo(np.float32).max)


RECIPE = bs.recipe("float8_delayed", history=L)


def model(layers: int = 2) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(bs.Linear(6, 6) for _ in range(layers)))


def batches() -> Any:
    for seed in itertools.count(10):
        torch.manual_seed(seed)
        yield torch.randn(3, 6)


def step(net: nn.Module, x: Tensor, run: Callable[..., Any] | None = None) -> None:
    with bs.autocast(recipe=RECIPE):
        y = net(x) if run is None else run(net, x)
    y.square().sum().backward()


def state(net: nn.Module) -> dict[str, list[float]]:
    return {
        name: [scaling.scale_G.item(), *scaling.history_LG[:, 0].tolist()]
        for name, scaling in scaling_state(net).items()
    }


def noted(net: nn.Module, key: str) -> list[float]:
    """The steps that the history holds, oldest first."""
    return [amax for amax in state(net)[key][1:] if amax]
