"""Torch's optimizers and the ways in which each can step: one by one, as lists, in one launch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, optim

from format_cases import quantized

SHAPE = (33, 40)
Make = Callable[..., Any]


def _of(kind: Any, **options: Any) -> Make:
    return functools.partial(kind, **({"lr": 0.1} | options))


OPTIMIZERS: dict[str, Make] = {
    "sgd": _of(optim.SGD),
    "sgd-momentum": _of(optim.SGD, momentum=0.9),
    "sgd-decay": _of(optim.SGD, weight_decay=0.1),
    "sgd-ascent": _of(optim.SGD, weight_decay=0.1, maximize=True),
    "adam": _of(optim.Adam),
    "adam-decay": _of(optim.Adam, weight_decay=0.1, amsgrad=True),
    "adamw": _of(optim.AdamW, weight_decay=0.1),
    "adamax": _of(optim.Adamax, weight_decay=0.1),
    "nadam": _of(optim.NAdam, weight_decay=0.1),
    "radam": _of(optim.RAdam, weight_decay=0.1),
    "adagrad": _of(optim.Adagrad, weight_decay=0.1),
    "adadelta": _of(optim.Adadelta, lr=1.0, weight_decay=0.1),
    "adafactor": _of(optim.Adafactor, weight_decay=0.1),
    "rmsprop": _of(optim.RMSprop, lr=0.01, weight_decay=0.1, momentum=0.9, centered=True),
    "rprop": _of(optim.Rprop, lr=0.01),
    "asgd": _of(optim.ASGD, weight_decay=0.1),
    "muon": _of(optim.Muon),
}
WAYS: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def has_way(make: Any, way: str) -> bool:
    """Whether the optimizer can be told to step in this way."""
    known = inspect.signature(make.func).parameters
    return way == "for-loop" or WAYS[way].keys() <= known.keys()


def options_of(make: Any, way: str, **more: Any) -> dict[str, Any]:
    """What tells the optimizer to step in this way, and ``more`` of what it knows."""
    known = inspect.signature(make.func).parameters
    return {key: value for key, value in (WAYS[way] | more).items() if key in known}


PAIRS = [(name, way) for name, make in OPTIMIZERS.items() for way in WAYS if has_way(make, way)]
by_pair = pytest.mark.parametrize(("name", "way"), PAIRS, ids=[f"{n}-{w}" for n, w in PAIRS])


def steps(name: str, way: str, parameter: Any, count: int = 3, **more: Any) -> Any:
    """``count`` steps along gradients that are always the same."""
    generator = torch.Generator().manual_seed(3)
    make = OPTIMIZERS[name]
    optimizer = make([parameter], **options_of(make, way, **more))
    for _ in range(count):
        gradient = torch.randn(SHAPE, generator=generator)
        parameter.grad = gradient.to(parameter.device, parameter.dtype)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def check_one_step(name: str, way: str, format: Any, device: str = "cpu", **more: Any) -> None:
    """A step of a quantized parameter is that of its values, but for the format's rounding."""
    q: Any = torch.nn.Parameter(quantized(format).to(device))
    plain = torch.nn.Parameter(q.dequantize())
    version = q._version
    optimizer = steps(name, way, q, count=1, **more)
    steps(name, way, plain, count=1, **more)
    assert q._version > version
    # Decay and step are each rounded to the format.
    torch.testing.assert_close(
        q.dequantize(), plain.detach(), rtol=2 * format.rtol, atol=2 * format.atol
    )
    state = [s for s in optimizer.state[q].values() if isinstance(s, Tensor) and s.ndim == 2]
    assert all(type(moment) is torch.Tensor for moment in state)
