"""Where copies run, seen from the stream that computes.

Copies into pages have a lane of their own, and so have copies back: one need not queue behind
the other.  Taking pages and giving them back share the outward lane, so each sees what the one
before it left.  A CPU has one lane, and everything happens in the order of the calls.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from backstash.device import current_gpu, raw_stream

Stream = Any  # torch.cuda.Stream; None on a CPU
#: ``torch.cuda.Event``; or a stream, for all that will have been launched there when somebody
#: waits, which costs nothing until then, and nothing in that stream; None on a CPU.
Event = Any


class Streams(abc.ABC):
    """The two lanes of one device, and how they are ordered."""

    @abc.abstractmethod
    def is_capturing(self) -> bool:
        """Is what is launched now recorded into a CUDA graph, not run?"""

    @abc.abstractmethod
    def here(self) -> Stream:
        """The stream that computes."""

    @abc.abstractmethod
    def outward(self, after: Sequence[Event]) -> contextlib.AbstractContextManager[None]:
        """Launch copies into pages, behind ``after`` and what is in the lane."""

    @abc.abstractmethod
    def inward(self, after: Sequence[Event]) -> contextlib.AbstractContextManager[None]:
        """Launch copies out of pages, behind ``after`` and what is in the lane."""

    @abc.abstractmethod
    def on(self, stream: Stream) -> contextlib.AbstractContextManager[None]:
        """Launch on a stream that computes."""

    @abc.abstractmethod
    def event(self) -> Event:
        """A mark behind everything launched so far where launches go now."""

    @abc.abstractmethod
    def wait(self, event: Event, stream: Stream) -> None:
        """Let ``stream`` go on only behind ``event``."""

    @abc.abstractmethod
    def lend(self, tensor: Tensor, owner: Stream) -> None:
        """Use memory of ``owner``'s on the stream that computes here."""

    @abc.abstractmethod
    def host_wait(self, event: Event) -> None:
        """Let the host go on only behind ``event``."""

    @abc.abstractmethod
    def has_passed(self, event: Event) -> bool:
        """Is everything in front of ``event`` done?  The host does not wait for the answer."""

    @abc.abstractmethod
    def join(self) -> None:
        """Let the stream that computes go on only behind both lanes."""

    @abc.abstractmethod
    def hold(self, *tensors: Tensor) -> None:
        """Keep memory of the host, which no stream orders, until what was launched is done."""


_ANYWHERE = contextlib.nullcontext()


class OneLane(Streams):
    """A CPU: a call has done its work when it returns."""

    def is_capturing(self) -> bool:
        return False

    def here(self) -> Stream:
        return None

    def outward(self, after: Sequence[Event]) -> contextlib.AbstractContextManager[None]:
        return _ANYWHERE

    def inward(self, after: Sequence[Event]) -> contextlib.AbstractContextManager[None]:
        return _ANYWHERE

    def on(self, stream: Stream) -> contextlib.AbstractContextManager[None]:
        return _ANYWHERE

    def event(self) -> Event:
        return None

    def wait(self, event: Event, stream: Stream) -> None:
        return None

    def lend(self, tensor: Tensor, owner: Stream) -> None:
        return None

    def host_wait(self, event: Event) -> None:
        return None

    def has_passed(self, event: Event) -> bool:
        return True

    def join(self) -> None:
        return None

    def hold(self, *tensors: Tensor) -> None:
        return None


class _Launching(contextlib.AbstractContextManager[None]):
    """Launch on a stream of the current device, then on the one before again.

    What torch's own context does where the device is the current one, without looking for others.
    """

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.cuda.Stream, before: torch.cuda.Stream) -> None:
        self._stream = stream
        self._before = before

    def __enter__(self) -> None:
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *exception: object) -> None:
        torch.cuda.set_stream(self._before)


class SideLanes(Streams):
    """A GPU: two streams beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Torch takes a number as it is, and looks long at a device.
        self._index = device.index
        # A stream of torch for each that it has: which one is asked many times a layer.
        self._known: dict[int, torch.cuda.Stream] = {}
        # Blocks of a copy go before those of a matmul that would fill the device for long.
        self._out = torch.cuda.Stream(device, priority=-1)
        self._in = torch.cuda.Stream(device, priority=-1)

    def is_capturing(self) -> bool:
        if current_gpu() == self._index:
            return torch.cuda.is_current_stream_capturing()
        with torch.cuda.device(self.device):
            return torch.cuda.is_current_stream_capturing()

    def here(self) -> Stream:
        handle = raw_stream(self._index)
        stream = self._known.get(handle)
        if stream is None:
            stream = self._known[handle] = torch.cuda.current_stream(self._index)
        return stream

    def outward(self, after: Sequence[Event]) -> contextlib.AbstractContextManager[None]:
        return self._behind(after, self._out)

    def inward(self, after: Sequence[Event]) -> contextlib.AbstractContextManager[None]:
        return self._behind(after, self._in)

    def _behind(
        self, after: Sequence[Event], lane: torch.cuda.Stream
    ) -> contextlib.AbstractContextManager[None]:
        for event in after:
            self.wait(event, lane)
        return self.on(lane)

    def on(self, stream: Stream) -> contextlib.AbstractContextManager[None]:
        if current_gpu() != self._index:
            return torch.cuda.stream(stream)
        here = self.here()
        return _ANYWHERE if stream is here else _Launching(stream, here)

    def event(self) -> Event:
        event = torch.cuda.Event()
        event.record(self.here())
        return event

    def wait(self, event: Event, stream: Stream) -> None:
        if not isinstance(event, torch.cuda.Stream):
            stream.wait_event(event)
        elif event != stream:
            stream.wait_stream(event)

    def lend(self, tensor: Tensor, owner: Stream) -> None:
        if (here := self.here()) != owner:
            tensor.record_stream(here)

    def host_wait(self, event: Event) -> None:
        event.synchronize()

    def has_passed(self, event: Event) -> bool:
        return event.query()

    def join(self) -> None:
        here = self.here()
        for lane in (self._out, self._in):
            # A lane that a capture has not used yet is no part of it until it waits itself.
            lane.wait_stream(here)
            here.wait_stream(lane)

    def hold(self, *tensors: Tensor) -> None:
        """Copy a little of each: torch keeps pinned memory until copies of it are done."""
        if self.is_capturing():
            return
        for stream in (self._out, self._in, self.here()):
            with self.on(stream):
                for tensor in tensors:
                    tensor[:1].to(self.device, non_blocking=True)


def streams_of(device: torch.device) -> Streams:
    """The lanes of ``device``."""
    return SideLanes(device) if device.type == "cuda" else OneLane()
