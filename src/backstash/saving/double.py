"""A backward that cannot be differentiated again, and says so.

``torch.autograd.function.once_differentiable`` notices only a gradient that itself requires
grad.  The gradient of ``y.sum()`` does not, and a second derivative would then silently miss
every term that goes through what the function saved.  This one marks what backward returns
whenever a graph of backward is being recorded, so differentiating it raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from backstash.errors import SecondOrderError


class _Refuse(torch.autograd.Function):
    """Passes values on; its own backward raises."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple([value.view_as(value) for value in values])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise SecondOrderError(
            "a layer of backstash was differentiated twice (create_graph=True), and its backward "
            "has no derivative; use torch.nn layers where a second derivative is needed"
        )


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of an ``autograd.Function`` that has no derivative of its own.

    What it returns is plain values; under ``create_graph=True`` they raise
    :class:`SecondOrderError` when they are differentiated.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        with torch.no_grad():
            outputs = backward(ctx, *grads)
        recorded = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        return _refusing(outputs) if recorded else outputs

    return run


def _refusing(outputs: Any) -> Any:
    several = outputs if isinstance(outputs, tuple) else (outputs,)
    places = [i for i, value in enumerate(several) if isinstance(value, Tensor)]
    # Something that requires grad, so that the values belong to a graph at all.
    anchor = torch.empty(0, requires_grad=True)
    marked = _Refuse.apply(anchor, *(several[i] for i in places)) if places else ()
    refusing = list(several)
    for place, value in zip(places, marked, strict=True):
        refusing[place] = value
    return tuple(refusing) if isinstance(outputs, tuple) else refusing[0]
