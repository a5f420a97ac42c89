"""A backward that cannot be differentiated again, and says so.

``torch.autograd.function.once_differentiable`` notices only a gradient that itself requires
grad.  The gradient of ``y.sum()`` does not, and a second derivative would then silently miss
every term that goes through what the function saved.  This one marks what backward returns
whenever a graph of backward is being recorded, so differentiating it raises.  The mark depends
on all that the function depended on: else autograd would find that nothing leads there, and
``torch.autograd.functional.hessian`` would be zero without a word.
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
    def forward(ctx: Any, anchors: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        values = tensors[anchors:]
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
        return _refusing(outputs, _origins(ctx, grads)) if recorded else outputs

    return run


def _origins(node: Any, grads: tuple[Any, ...]) -> list[Tensor]:
    """What the outputs of this backward depend on: its gradients, and the leaves before it."""
    origins = [grad for grad in grads if isinstance(grad, Tensor) and grad.requires_grad]
    seen: set[Any] = set()
    waiting = [node]
    while waiting:
        before = waiting.pop()
        if before is None or before in seen:
            continue
        seen.add(before)
        leaf = getattr(before, "variable", None)
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            origins.append(leaf)
        waiting += [function for function, _ in before.next_functions]
    return origins


def _refusing(outputs: Any, origins: list[Tensor]) -> Any:
    several = outputs if isinstance(outputs, tuple) else (outputs,)
    places = [i for i, value in enumerate(several) if isinstance(value, Tensor)]
    # Something that requires grad, so that the values belong to a graph at all.
    anchors = [torch.empty(0, device="cpu", requires_grad=True), *origins]
    values = [several[i] for i in places]
    marked = _Refuse.apply(len(anchors), *anchors, *values) if places else ()
    refusing = list(several)
    for place, value in zip(places, marked, strict=True):
        refusing[place] = value
    return tuple(refusing) if isinstance(outputs, tuple) else refusing[0]
