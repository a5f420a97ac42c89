"""Saved values that backward reads where a handler keeps them, without a copy.

Autograd asks its hooks for tensors.  So for a node that can read a value in place, what a hook
gives is a *stand-in*, a tensor of nothing; the node knows which values it stands for, and asks
their handlers itself: by ``read(handle, fits)``, which is ``unpack(handle)`` but for values that
are somewhere else than in a tensor and that ``fits`` takes as they are.

Only the hooks of the innermost :class:`~backstash.saving.saving` give stand-ins, and only to the
node itself: whatever runs while they are asked, another hook or a backward inside of one, gets
tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from backstash.kernels import InPages, Slabs

#: Whether what lies in pages can be read there.
Fits = Callable[[InPages], bool]


class Place(NamedTuple):
    """Where a handler wants a value computed, and what to save in its stead.

    That is a tensor of the same shape on no device, without values; backward gets those.
    """

    slabs: Slabs
    stand_in: Tensor


class Held(Protocol):
    """A tensor that a handler keeps."""

    def restore(self) -> Tensor:
        """The tensor."""
        ...

    def read(self, fits: Fits) -> Tensor | InPages:
        """The tensor, or where it lies if it fits."""
        ...


class StandIns:
    """The tensors that stand for what handlers keep, while one node asks for what it saved."""

    def __init__(self) -> None:
        # Autograd may pass on another object, but its storage is the one that was given; held
        # here, its address is no other's.
        self._held: dict[int, tuple[Tensor, Held]] = {}

    def add(self, held: Held) -> Tensor:
        """A tensor that stands for ``held``."""
        stand_in = torch.empty(0, device="cpu")
        self._held[stand_in.untyped_storage()._cdata] = stand_in, held
        return stand_in

    def resolve(self, tensor: Tensor | None, fits: Fits | None) -> Any:
        """What ``tensor`` stands for; in place if it ``fits``."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.numel():
            return tensor
        found = self._held.get(tensor.untyped_storage()._cdata)
        if found is None:
            return tensor
        return found[1].restore() if fits is None else found[1].read(fits)


class _Asking(threading.local):
    stand_ins: StandIns | None = None


_asking = _Asking()


def take_stand_ins() -> StandIns | None:
    """Where the node that asks on this thread wants stand-ins, until they are put back."""
    stand_ins, _asking.stand_ins = _asking.stand_ins, None
    return stand_ins


def put_stand_ins(stand_ins: StandIns) -> None:
    """Go on giving stand-ins to the same node."""
    _asking.stand_ins = stand_ins


def saved_in_place(ctx: Any, fits: Mapping[int, Fits]) -> tuple[Any, ...]:
    """``ctx.saved_tensors``, of which those with an entry in ``fits`` may be in pages."""
    before, _asking.stand_ins = _asking.stand_ins, StandIns()
    try:
        stand_ins = _asking.stand_ins
        tensors = ctx.saved_tensors
    finally:
        _asking.stand_ins = before
    return tuple([stand_ins.resolve(tensor, fits.get(i)) for i, tensor in enumerate(tensors)])
