"""The parameters that every rank keeps whole: biases, norms, routers.

They are equal on all ranks and have to stay so, so their gradients are reduced when backward
has ended, all in one collective a dtype, with the same sum or mean as those of the shards.

A gradient that an earlier backward pass left is put aside meanwhile, because it has been
reduced already: what is sent is what this pass added, and nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from backstash.weights.channel import Channel


class Replicas:
    """Parameters whose gradients are reduced when backward ends."""

    def __init__(self, parameters: Iterable[Tensor], channel: Channel, divisor: int) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._channel = channel
        self._divisor = divisor
        self._aside: list[Tensor | None] | None = None

    def set_aside(self) -> None:
        """Backward begins: keep what is there apart from what comes."""
        if self._aside is None:
            self._aside = [p.grad for p in self._parameters]
            for p in self._parameters:
                p.grad = None

    def put_back(self) -> None:
        """Add what is there to what was put aside."""
        if self._aside is None:
            return
        aside, self._aside = self._aside, None
        for p, earlier in zip(self._parameters, aside, strict=True):
            if earlier is not None:
                p.grad = earlier if p.grad is None else earlier.add_(p.grad)

    def reduce(self) -> None:
        """Backward has ended: reduce what came, and add it to what was put aside.

        A parameter that no rank used keeps its gradient, or keeps having none.
        """
        if self._channel.size > 1 and self._parameters:
            used = self._channel.any_of([p.grad is not None for p in self._parameters])
            chosen = [p for p, is_used in zip(self._parameters, used, strict=True) if is_used]
            for alike in _by_dtype(chosen).values():
                self._reduce_together(alike)
        self.put_back()

    def _reduce_together(self, parameters: list[Tensor]) -> None:
        with torch.no_grad():
            for p in parameters:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
            grads = [_local(p.grad) for p in parameters if p.grad is not None]
            total = self._channel.total(torch.cat([grad.flatten() for grad in grads]))
            pieces = (total / self._divisor).split([grad.numel() for grad in grads])
            for grad, piece in zip(grads, pieces, strict=True):
                grad.copy_(piece.view(grad.shape))


def _local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor that is sharded over another axis of a mesh."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _by_dtype(parameters: list[Tensor]) -> dict[object, list[Tensor]]:
    alike: dict[object, list[Tensor]] = {}
    for p in parameters:
        alike.setdefault((p.dtype, p.device), []).append(p)
    return alike
