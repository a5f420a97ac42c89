"""The stream on which sharded weights move, and those on which they are used.

All collectives, and the memory that they fill, belong to one stream: that on which the forward
pass began, the *home*.  A layer that runs on another stream is a visitor.  What it is to see is
done before it goes on, what it gives is waited for, and memory that crosses is marked as used on
both sides, or torch would lend it to others while the far side still reads.

Streams that share weights wait for each other at each of their weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from backstash.tensors import QuantizedTensor

Given = TypeVar("Given", bound=Sequence[Tensor | None])


class Stay:
    """Work on the home stream itself, which needs no care."""

    def __enter__(self) -> Stay:
        return self

    def __exit__(self, *error: Any) -> None:
        return None

    def bring(self, tensors: Given) -> Given:
        """Use tensors at home that were made where the visitor works."""
        return tensors

    def take(self, tensors: Given) -> Given:
        """Use tensors where the visitor works that were made at home."""
        return tensors


_STAY = Stay()


class Visit(Stay):
    """Work on the home stream, in the midst of work on another."""

    def __init__(self, home: Any, away: Any) -> None:
        self._home = home
        self._away = away
        self._inside = torch.cuda.stream(home)

    def __enter__(self) -> Visit:
        self._home.wait_stream(self._away)
        self._inside.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._inside.__exit__(*error)
        self._away.wait_stream(self._home)

    def bring(self, tensors: Given) -> Given:
        _mark(tensors, self._home)
        return tensors

    def take(self, tensors: Given) -> Given:
        _mark(tensors, self._away)
        return tensors


class Home:
    """Knows the home stream; without a GPU there is none, and nobody visits."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._device = torch.device("cpu")

    def settle(self, device: torch.device) -> None:
        """The stream that is current now is home, until another forward pass begins."""
        self._device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def visit(self) -> Stay:
        """A context in which what is launched runs at home."""
        if self._stream is None:
            return _STAY
        away = torch.cuda.current_stream(self._device)
        return _STAY if away == self._stream else Visit(self._stream, away)


def _mark(tensors: Sequence[Tensor | None], stream: Any) -> None:
    for tensor in tensors:
        whole = tensor.buffers.values() if isinstance(tensor, QuantizedTensor) else (tensor,)
        for buffer in whole:
            if buffer is not None and buffer.device == stream.device:
                buffer.record_stream(stream)
