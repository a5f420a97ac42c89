"""Delayed scaling: a scale learnt from the largest magnitudes of earlier steps.

The cast of a tensor uses the scale that earlier steps left, while the tensor's own largest
magnitude is noted.  At the end of a step the notes go into the history and give the next
scale.  The notes of a step are held apart until it has ended well: a step that fails leaves
history and scale as they were, and a recomputation notes nothing, so nothing is counted
twice.

A step is one outermost ``autocast``.  For its forward operands it ends when that is left; for
gradients when it has been left and the last of its calls has run backward.  A call whose
graph is gone is not waited for.  Where one is still alive that nobody runs backward, the step
ends as soon as a later one asks for the scale.

Where several processes each see a part of a tensor, their largest magnitudes are brought together
before they count: those of forward when the autocast is left, those of gradients when a backward
pass has gone well.  Both are moments that all processes reach in the same order.  All that one
moment brings goes in one collective.

Letters: L steps of history, G groups, each with a scale of its own.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
import weakref
from typing import Any

import torch
from torch import Tensor, distributed

from backstash.errors import CheckpointError
from backstash.formats import Float8Delayed

_FLOAT32_MAX = torch.finfo(torch.float32).max


class DelayedScaling:
    """The scale of one operand of one matmul, and the history that it comes from.

    Attributes:
        scale_G: float32, what values are multiplied by before the cast; ones at first.
        history_LG: float32; slot 0 is free for the step that is running, the last slot is the
            step before.
        open_step: The step whose gradients were noted and not yet taken in.
    """

    def __init__(self, format: Float8Delayed, groups: int, device: torch.device) -> None:
        self.format = format
        self.scale_G = torch.ones(groups, dtype=torch.float32, device=device)
        self.history_LG = torch.zeros(format.history, groups, dtype=torch.float32, device=device)
        self.open_step: Step | None = None

    def update(self, amax_G: Tensor) -> None:
        """Take the largest magnitudes of a step in, and compute the next scale from all.

        A step without a magnitude (zero) changes nothing.  An infinite one is remembered and
        leaves the scale as it is.  The tensors are replaced, not written, so a call that holds
        the scale of its forward keeps it.
        """
        self.history_LG, self.scale_G = self._after(amax_G)

    def _after(self, amax_G: Tensor) -> tuple[Tensor, Tensor]:
        """History and scale once a step has noted ``amax_G``."""
        last_G = torch.maximum(self.history_LG[0], amax_G)
        rolled_LG = torch.cat([self.history_LG[1:], last_G[None]])
        scale_G = self._scale_from(rolled_LG)
        rolled_LG[0] = 0
        saw_values_G = last_G != 0
        return (
            torch.where(saw_values_G, rolled_LG, self.history_LG),
            torch.where(saw_values_G, scale_G, self.scale_G),
        )

    def _scale_from(self, history_LG: Tensor) -> Tensor:
        amax_G = history_LG[-1] if self.format.most_recent else history_LG.amax(0)
        largest = self.format.code.largest * 2.0**-self.format.margin
        scale_G = (torch.full_like(amax_G, largest) / amax_G).clamp(max=_FLOAT32_MAX)
        return torch.where(amax_G.isfinite() & (amax_G > 0), scale_G, self.scale_G)

    def follow(self, format: Float8Delayed) -> None:
        """Go on with other options: what was seen stays seen, the scale is computed anew."""
        before, self.format = self.format, format
        if _without_group(format) == _without_group(before):
            return
        steps, kept = len(self.history_LG), min(format.history, len(self.history_LG))
        history_LG = self.history_LG.new_zeros(format.history, self.history_LG.shape[1])
        history_LG[format.history - kept :] = self.history_LG[steps - kept :]
        self.history_LG = history_LG
        self.scale_G = self._scale_from(history_LG)

    def settled(self) -> tuple[Tensor, Tensor]:
        """History and scale, with the gradients of a step that waits for no more taken in."""
        noted_G = None if self.open_step is None else self.open_step.noted_gradient(self)
        return (self.history_LG, self.scale_G) if noted_G is None else self._after(noted_G)

    def settle_into_(self, history_LG: Tensor, scale_G: Tensor) -> None:
        """Write what has been learnt into tensors that stay where they are, and go on with them."""
        for place, learnt in zip((history_LG, scale_G), self.settled(), strict=True):
            if place is not learnt:
                place.copy_(learnt)
        self.history_LG, self.scale_G, self.open_step = history_LG, scale_G, None

    def load(self, history_LG: Tensor, scale_G: Tensor) -> None:
        """Take over a saved state, and forget what an open step noted.

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
        self.open_step = None

    def to(self, device: torch.device) -> None:
        """Move to ``device``."""
        self.history_LG, self.scale_G = self.history_LG.to(device), self.scale_G.to(device)

    def __getstate__(self) -> dict[str, Any]:
        # A step that is open belongs to the graph of the original, not to a copy.
        history_LG, scale_G = self.settled()
        mine = {"history_LG": history_LG, "scale_G": scale_G, "open_step": None}
        # Nor can a process group be copied; the next call names it again.
        return self.__dict__ | mine | {"format": _without_group(self.format)}


class _State(enum.Enum):
    """Where a step is."""

    OPEN = "open"  # its autocast has not been left
    LEFT = "left"  # forward has ended, backward may be running
    ENDED = "ended"  # it takes no more notes


class Gradient:
    """The output gradient of one call: noted for the step, and quantized with one scale.

    It lives in the plan of the call, so as long as its graph; a second backward through a
    retained graph quantizes as the first did.
    """

    def __init__(self, step: Step | None, scaling: DelayedScaling) -> None:
        self.step = step
        self.scaling = scaling
        self.noted = False
        self._scale_G: Tensor | None = None

    def scale_G(self) -> Tensor:
        """The scale that the first backward of this call found."""
        if self._scale_G is None:
            earlier = self.scaling.open_step
            if earlier is not None and earlier is not self.step:
                earlier.end_backward()
            self._scale_G = self.scaling.scale_G
        return self._scale_G

    @property
    def is_noting(self) -> bool:
        """Whether somebody still wants to know the magnitudes."""
        return self.step is not None and self.step.is_noting_gradients

    def note(self, amax_G: Tensor) -> None:
        """Note the largest magnitudes."""
        if self.step is not None:
            self.step.note_backward(self, amax_G)


_Notes = dict[DelayedScaling, Tensor]
_Noted = list[tuple[DelayedScaling, Tensor]]


class Step:
    """What one outermost ``autocast`` noted, until it is known that the step went well."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._state = _State.OPEN
        self._forward: _Notes = {}
        self._backward: _Notes = {}
        # By backward pass: those of one that fails are never taken in.
        self._running: dict[int, dict[Gradient, Tensor]] = {}
        self._gradients: weakref.WeakSet[Gradient] = weakref.WeakSet()

    @property
    def is_noting_forward(self) -> bool:
        """Whether magnitudes of forward operands are still noted."""
        return self._state is _State.OPEN

    @property
    def is_noting_gradients(self) -> bool:
        """Whether magnitudes of gradients are still noted."""
        return self._state is not _State.ENDED

    def expect_backward(self, scaling: DelayedScaling) -> Gradient:
        """A call was made whose gradient will be quantized."""
        gradient = Gradient(self, scaling)
        with self._lock:
            self._gradients.add(gradient)
        return gradient

    def note_forward(self, scaling: DelayedScaling, amax_G: Tensor) -> None:
        """Note the largest magnitudes of a forward operand."""
        with self._lock:
            if self.is_noting_forward:
                _note(self._forward, scaling, amax_G)

    def note_backward(self, gradient: Gradient, amax_G: Tensor) -> None:
        """Note those of a gradient; they count once its backward pass has gone well."""
        backward = torch._C._current_graph_task_id()
        with self._lock:
            if not self.is_noting_gradients:
                return
            starts = backward not in self._running
            _note(self._running.setdefault(backward, {}), gradient, amax_G)
        if backward == -1:
            self._backward_went_well(backward)
        elif starts:
            torch.autograd.Variable._execution_engine.queue_callback(  # pyright: ignore
                lambda: self._backward_went_well(backward)
            )

    def leave(self, *, learns: bool) -> None:
        """The autocast was left; where it ``learns``, the scales of forward operands move on."""
        with self._lock:
            notes = _take(self._forward)
            if self._state is _State.OPEN:
                self._state = _State.LEFT
        for scaling, amax_G in _of_all_processes(notes) if learns else ():
            scaling.update(amax_G)
        self._end_if_last()

    def abandon(self) -> None:
        """The autocast was left by an exception: nothing was learnt."""
        with self._lock:
            self._state = _State.ENDED
            gradients = _take(self._backward)
            self._forward.clear()
            self._running.clear()
        for scaling, _ in gradients:
            scaling.open_step = None

    def end_backward(self) -> None:
        """Let the scales of gradients move on, whoever is still waited for."""
        with self._lock:
            if self._state is _State.OPEN:
                return
            self._state = _State.ENDED
            notes = _take(self._backward)
        for scaling, amax_G in notes:
            # A state that was loaded in between knows nothing of this step.
            if scaling.open_step is self:
                scaling.open_step = None
                scaling.update(amax_G)

    def noted_gradient(self, scaling: DelayedScaling) -> Tensor | None:
        """What is noted of a gradient, once the autocast was left."""
        return self._backward.get(scaling) if self._state is _State.LEFT else None

    def _backward_went_well(self, backward: int) -> None:
        with self._lock:
            running = self._running.pop(backward, {})
        notes = _of_all_processes([(g.scaling, amax_G) for g, amax_G in running.items()])
        with self._lock:
            for gradient, (scaling, amax_G) in zip(running, notes, strict=True):
                gradient.noted = True
                if self.is_noting_gradients:
                    _note(self._backward, scaling, amax_G)
                    scaling.open_step = self
        self._end_if_last()

    def _end_if_last(self) -> None:
        with self._lock:
            waits = any(not gradient.noted for gradient in self._gradients)
            if not self._backward or waits:
                return
        self.end_backward()


def _note(notes: dict[Any, Tensor], key: Any, amax_G: Tensor) -> None:
    noted_G = notes.get(key)
    notes[key] = amax_G if noted_G is None else torch.maximum(noted_G, amax_G)


def _take(notes: _Notes) -> _Noted:
    taken = list(notes.items())
    notes.clear()
    return taken


def _of_all_processes(notes: _Noted) -> _Noted:
    """The notes with the largest magnitudes of the group that shares each scale."""
    common = [amax_G for _, amax_G in notes]
    by_group: dict[Any, list[int]] = {}
    for index, (scaling, _) in enumerate(notes):
        if scaling.format.amax_group is not None:
            by_group.setdefault(scaling.format.amax_group, []).append(index)
    for group, mine in by_group.items():
        largest = torch.cat([common[index] for index in mine])
        distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=group)
        for index, amax_G in zip(mine, largest.split([len(common[i]) for i in mine]), strict=True):
            common[index] = amax_G
    return [(scaling, amax_G) for (scaling, _), amax_G in zip(notes, common, strict=True)]


def _without_group(format: Float8Delayed) -> Float8Delayed:
    """The options without the group, which say nothing about what was seen."""
    return dataclasses.replace(format, amax_group=None)
