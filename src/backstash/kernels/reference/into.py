"""Where a quantizer writes: into fresh memory, or into buffers that are there already.

A weight is quantized again and again into the same buffers, and under a CUDA graph also in
the steps in which it has not changed.  A flag in the device's memory says so there: when it
is set, the quantizer reads nothing and leaves the buffers as they are, and the host, which
replays the graph, need not know.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVarTuple, cast

import torch
from torch import Tensor

from backstash.errors import LayoutError

_FLAGS = (torch.float32, torch.int32)
Fresh = TypeVarTuple("Fresh")


@dataclasses.dataclass(frozen=True)
class Into:
    """Contiguous buffers in the order in which a quantizer returns its results.

    With ``noop``, a float32 or int32 tensor of one element on their device, they are left as
    they are where it is not zero.

    Raises:
        LayoutError: A buffer is not contiguous, or ``noop`` is not one such number.
    """

    buffers: tuple[Tensor, ...]
    noop: Tensor | None = None

    def __post_init__(self) -> None:
        for buffer in self.buffers:
            if not buffer.is_contiguous():
                raise LayoutError(
                    f"buffers to quantize into must be contiguous, got one of shape "
                    f"{tuple(buffer.shape)} with strides {buffer.stride()}; pass whole buffers"
                )
        if self.noop is not None:
            check_noop(self.noop, self.buffers[0].device)

    def write(self, *fresh: Tensor) -> tuple[Tensor, ...]:
        """Copy ``fresh`` into the buffers, unless they are to be left as they are."""
        for buffer, values in zip(self.buffers, fresh, strict=True):
            if self.noop is not None:
                values = torch.where(self.noop.reshape(()) != 0, buffer, values)
            buffer.copy_(values)
        return self.buffers


def check_noop(noop: Tensor, device: torch.device) -> None:
    """Refuse what is not one float32 or int32 number on this device."""
    if noop.numel() != 1 or noop.dtype not in _FLAGS or noop.device != device:
        raise LayoutError(
            f"noop must be one float32 or int32 number on {device}, got {noop.dtype} "
            f"{tuple(noop.shape)} on {noop.device}; make it with torch.zeros(1, device=...)"
        )


def noop_of(into: Into | None) -> Tensor | None:
    """The flag, if there is one."""
    return None if into is None else into.noop


def written(into: Into | None, *fresh: *Fresh) -> tuple[*Fresh]:
    """The tensors ``fresh``, or the buffers of ``into`` with what they hold now."""
    if into is None:
        return fresh
    return cast("tuple[*Fresh]", into.write(*cast("tuple[Tensor, ...]", fresh)))


def unless(noop: Tensor | None, amax: Tensor) -> Tensor:
    """A largest magnitude; zero where the device's flag is set and nothing was to be read."""
    return amax if noop is None else torch.where(noop.reshape(()) != 0, 0.0, amax)
