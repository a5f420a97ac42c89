"""Delayed scaling: a scale learnt from the largest magnitudes of earlier steps.

The cast of a tensor uses the scale that earlier steps left, while the tensor's own largest
magnitude is noted.  At the end of a step the notes go into the history and give the next
scale.  The notes of a step are held apart until it has ended well: a step that fails leaves
history and scale as they were, and a recomputation notes nothing, so nothing is counted
twice.  A step ends for its forward operands when the outermost ``autocast`` is left, and for
gradients when the last of its calls has run backward.

Letters: L steps of history, G groups, each with a scale of its own.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from backstash.errors import CheckpointError
from backstash.formats import Float8Delayed

_FLOAT32_MAX = torch.finfo(torch.float32).max


class DelayedScaling:
    """The scale of one operand of one matmul, and the history that it comes from.

    Attributes:
        scale_G: float32, what values are multiplied by before the cast; ones at first.
        history_LG: float32; slot 0 collects the step that is running, the last slot is the
            step before.
    """

    def __init__(self, format: Float8Delayed, groups: int, device: torch.device) -> None:
        self.format = format
        self.scale_G = torch.ones(groups, dtype=torch.float32, device=device)
        self.history_LG = torch.zeros(format.history, groups, dtype=torch.float32, device=device)
        self.open_step: Step | None = None

    def update(self, amax_G: Tensor) -> None:
        """Take the largest magnitudes of a step in, and compute the next scale from all.

        A step without a magnitude (zero) changes nothing.  An infinite or undefined one is
        remembered and leaves the scale as it is.  The tensors are replaced, not written, so a
        call that holds the scale of its forward keeps it.
        """
        last_G = torch.maximum(self.history_LG[0], amax_G)
        rolled_LG = torch.cat([self.history_LG[1:], last_G[None]])
        amax_G = last_G if self.format.most_recent else rolled_LG.amax(0)
        rolled_LG[0] = 0
        saw_values_G = last_G != 0
        self.history_LG = torch.where(saw_values_G, rolled_LG, self.history_LG)
        largest = self.format.code.largest * 2.0**-self.format.margin
        scale_G = (torch.full_like(amax_G, largest) / amax_G).clamp(max=_FLOAT32_MAX)
        usable_G = saw_values_G & amax_G.isfinite() & (amax_G > 0)
        self.scale_G = torch.where(usable_G, scale_G, self.scale_G)

    def load(self, history_LG: Tensor, scale_G: Tensor) -> None:
        """Take over a saved state.

        Raises:
            CheckpointError: It has another number of steps or of groups.
        """
        came, wanted = (
            (history_LG.shape, scale_G.shape),
            (self.history_LG.shape, self.scale_G.shape),
        )
        if came != wanted:
            raise CheckpointError(
                f"delayed scaling here has history and scale of shapes {wanted}, the checkpoint "
                f"has {came}; use the recipe options that it was written with"
            )
        self.history_LG = history_LG.to(self.history_LG.device, torch.float32, copy=True)
        self.scale_G = scale_G.to(self.scale_G.device, torch.float32, copy=True)

    def to(self, device: torch.device) -> None:
        """Move to ``device``."""
        self.history_LG, self.scale_G = self.history_LG.to(device), self.scale_G.to(device)

    def __getstate__(self) -> dict[str, Any]:
        # A step that is open belongs to the graph of the original, not to a copy.
        return {**self.__dict__, "open_step": None}


class Step:
    """What one outermost ``autocast`` noted, until it is known that the step went well."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forward: dict[DelayedScaling, Tensor] = {}
        self._backward: dict[DelayedScaling, Tensor] = {}
        self._waiting = 0

    def expect_backward(self) -> None:
        """A call was made whose gradient will be quantized."""
        with self._lock:
            self._waiting += 1

    def note_forward(self, scaling: DelayedScaling, amax_G: Tensor) -> None:
        """Note the largest magnitudes of a forward operand."""
        with self._lock:
            _note(self._forward, scaling, amax_G)

    def note_backward(self, scaling: DelayedScaling, amax_G: Tensor) -> None:
        """Note those of a gradient, and end the step's backward if it was the last."""
        self.settle(scaling)
        with self._lock:
            scaling.open_step = self
            _note(self._backward, scaling, amax_G)
            self._waiting -= 1
            last = self._waiting <= 0
        if last:
            self.end_backward()

    def settle(self, scaling: DelayedScaling) -> None:
        """End the backward of an earlier step that left calls without one."""
        earlier = scaling.open_step
        if earlier is not None and earlier is not self:
            earlier.end_backward()

    def end_forward(self) -> None:
        """Let the scales of forward operands move on."""
        for scaling, amax_G in _take(self._forward):
            scaling.update(amax_G)

    def end_backward(self) -> None:
        """Let the scales of gradients move on."""
        for scaling, amax_G in _take(self._backward):
            scaling.open_step = None
            scaling.update(amax_G)


def _note(notes: dict[DelayedScaling, Tensor], scaling: DelayedScaling, amax_G: Tensor) -> None:
    noted_G = notes.get(scaling)
    notes[scaling] = amax_G if noted_G is None else torch.maximum(noted_G, amax_G)


def _take(notes: dict[DelayedScaling, Tensor]) -> list[tuple[Any, Tensor]]:
    taken = list(notes.items())
    notes.clear()
    return taken
