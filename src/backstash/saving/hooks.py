"""The one pair of saved-tensor hooks.

Autograd runs only the innermost pair of hooks, so there is one place that installs them:
``with saving(*handlers)``.  Each tensor that autograd saves is offered to the handlers in
order; the first that accepts keeps it, and what none wants goes on to the hooks that were
in force around this context (an offloader, a checkpoint, another ``saving``), or stays.

A handler lives by two methods::

    pack(tensor, rows) -> handle | None     # None: not mine
    unpack(handle) -> tensor                # may be asked again for a retained graph

A handle lives exactly as long as autograd holds it; what it holds it frees when it goes.
A handler may have four more methods: ``expect(tensors)``, ``multiply()``, ``claim(...)`` and
``read(handle, fits)``, see :func:`announce`, :func:`announce_product`, :func:`claim_places` and
:mod:`backstash.saving.in_place`.

``rows`` is the valid length that was marked for the buffer, see :mod:`backstash.saving.marks`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from backstash.errors import ConfigError, ModifiedError
from backstash.kernels import InPages, Moves
from backstash.opaque import opaque
from backstash.recompute import top_hooks
from backstash.saving.in_place import Fits, Place, put_stand_ins, take_stand_ins
from backstash.saving.marks import spend_mark, valid_rows

_push_hooks: Callable[..., None] = torch._C._autograd._push_saved_tensors_default_hooks  # pyright: ignore
_pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks  # pyright: ignore


class Handler(Protocol):
    """What ``saving`` asks of those that keep saved tensors."""

    def pack(self, tensor: Tensor, rows: Tensor | None) -> Any | None:
        """Keep the tensor and return a handle, or return None to decline it."""
        ...

    def unpack(self, handle: Any) -> Tensor:
        """The tensor that ``pack`` was given, bit for bit."""
        ...


class _Asked(threading.local):
    """The handler that was asked last on this thread: backward has no context to look into."""

    handler: Callable[[], Handler | None] | None = None


_asked = _Asked()


class _Held(NamedTuple):
    """A tensor that a handler keeps."""

    handler: Handler
    handle: Any

    def restore(self) -> Tensor:
        _asked.handler = weakref.ref(self.handler)
        return self.handler.unpack(self.handle)

    def read(self, fits: Fits) -> Tensor | InPages:
        read = getattr(self.handler, "read", None)
        if read is None:
            return self.restore()
        _asked.handler = weakref.ref(self.handler)
        return read(self.handle, fits)


class _Passed(NamedTuple):
    """A tensor that went on to the hooks around this context."""

    unpack: Callable[[Any], Tensor]
    packed: Any

    def restore(self) -> Tensor:
        return self.unpack(self.packed)


class _Original(NamedTuple):
    """A tensor that nobody wanted; autograd checks no versions under hooks, so this does."""

    tensor: Tensor
    version: int | None

    def restore(self) -> Tensor:
        if self.version is not None and self.tensor._version != self.version:
            raise ModifiedError(
                f"a tensor of shape {tuple(self.tensor.shape)} needed for backward was modified "
                f"in place: it is at version {self.tensor._version}, expected {self.version}; "
                f"change a clone instead"
            )
        return self.tensor


# Around a compiled model autograd calls these, and the compiler would take them for parts of it.
_uncompiled = opaque(reason="saved tensors are packed as they are; leave out fullgraph=True")


class _Frame:
    """One entry into a ``saving`` context: the pair of hooks on torch's own stack."""

    def __init__(self, handlers: tuple[Handler, ...], outer: Any) -> None:
        self.handlers = handlers
        self.outer = outer
        self.active = True

    @_uncompiled
    def pack(self, tensor: Tensor) -> Any:
        try:
            return self._pack(tensor)
        finally:
            spend_mark(tensor)

    def _pack(self, tensor: Tensor) -> Any:
        if self.active and not _is_weight(tensor):
            rows = valid_rows(tensor)
            for handler in self.handlers:
                handle = handler.pack(tensor, rows)
                if handle is not None:
                    return _Held(handler, handle)
        if self.outer is not None:
            return _Passed(self.outer[1], self.outer[0](tensor))
        version = None if tensor.is_inference() else tensor._version
        # A node that saves its own output would hold itself; the detached one has its version too.
        return _Original(tensor if tensor.grad_fn is None else tensor.detach(), version)

    @_uncompiled
    def unpack(self, packed: Any) -> Tensor:
        stand_ins = take_stand_ins()
        if stand_ins is None:
            return packed.restore()
        try:
            return stand_ins.add(packed) if type(packed) is _Held else packed.restore()
        finally:
            put_stand_ins(stand_ins)

    def announce(self, tensors: Sequence[Tensor]) -> None:
        for handler in self.handlers if self.active else ():
            expect = getattr(handler, "expect", None)
            if expect is not None:
                expect(tensors)
        outer = None if self.outer is None else _frame_of(self.outer)
        if outer is not None:
            outer.announce(tensors)


class saving:
    """Offer every tensor that autograd saves inside this context to ``handlers``, in order.

    Contexts nest, in each other and in any other saved-tensor hooks: what is declined goes
    outwards.  They may be left in another order than entered, entered again, and used by
    several threads.  Parameters, and views of them, are not offered.

    Raises:
        ConfigError: A handler lacks ``pack`` or ``unpack``.
    """

    def __init__(self, *handlers: Handler) -> None:
        for handler in handlers:
            methods = (getattr(handler, "pack", None), getattr(handler, "unpack", None))
            if isinstance(handler, type) or not all(map(callable, methods)):
                raise ConfigError(
                    f"saving needs handlers with pack(tensor, rows) and unpack(handle), got "
                    f"{handler!r}; give an object such as Meter()"
                )
        self.handlers = handlers
        # Torch's stack of hooks belongs to a thread, and so do the entries.
        self._frames: dict[int, list[_Frame]] = {}

    def __enter__(self) -> saving:
        frame = _Frame(self.handlers, top_hooks(True))
        _push_hooks(frame.pack, frame.unpack)
        self._frames.setdefault(threading.get_ident(), []).append(frame)
        return self

    def __exit__(self, *exception: object) -> None:
        here = threading.get_ident()
        frames = self._frames.get(here)
        if not frames:
            raise ConfigError(
                "saving was left in a thread where it had not been entered; hooks belong to a "
                "thread, so enter and leave it in the same one"
            )
        frame = frames.pop()
        if not frames:
            del self._frames[here]
        # Contexts inside this one may go on, and pass outwards what they decline.
        frame.active = False
        _take_off(frame)


def is_saving() -> bool:
    """Is a :class:`saving` context the innermost one, and so asked about each tensor?"""
    return _innermost() is not None


def is_hooked() -> bool:
    """Does any pair of saved-tensor hooks see what is saved now?  It may hold it for good."""
    return top_hooks(True) is not None


def announce(tensors: Sequence[Tensor | None]) -> None:
    """Tell handlers which tensors an autograd node will save together, before it does.

    A handler that wants to know has a method ``expect(tensors)``.  Hooks see one tensor at a
    time; with this, one copy can take all of a node's.
    """
    frame = _innermost()
    if frame is not None:
        frame.announce([t for t in tensors if t is not None and not _is_weight(t)])


def claim_places(
    like: Tensor, columns: Sequence[int], rows: int, ends_G: Tensor
) -> Sequence[Place] | None:
    """Ask where matrices that a node will compute and save should be computed.

    They have ``rows`` rows, of groups with these ends, so many columns each, and what ``like``
    has: its dtype and device.  Handlers are asked in order by ``claim(like, columns, rows,
    ends_G)``, up to one that has no such method, as it would be offered a tensor without values.
    None where they are to be computed anywhere, and offered as always.
    """
    frame = _innermost()
    for handler in frame.handlers if frame is not None and frame.active else ():
        claim = getattr(handler, "claim", None)
        if claim is None:
            return None
        places = claim(like, columns, rows, ends_G)
        if places is not None:
            return places
    return None


def announce_product() -> Moves | None:
    """Tell a handler that a large matmul is launched next; returns moves that it may make.

    A matmul computes more than it reads and writes, so what a handler has to copy costs least
    beside it.  A handler that wants to know has a method ``multiply()``, which returns a list of
    moves or None.  In forward the handlers in force are told, in backward the one asked last.
    """
    frame = _innermost()
    if frame is not None:
        handlers: Sequence[Any] = frame.handlers if frame.active else ()
    else:
        handlers = (_asked.handler() if _asked.handler is not None else None,)
    for handler in handlers:
        multiply = getattr(handler, "multiply", None)
        moves = None if multiply is None else multiply()
        if moves is not None:
            return moves
    return None


def _take_off(frame: _Frame) -> None:
    """Take one pair of hooks off torch's stack: the frame's, wherever it lies.

    Torch's own contexts take off what is on top when they are left, whoever put it there.
    Where one took ours before its time, its own pair is still there, and goes now.
    """
    above: list[Any] = []
    while (top := top_hooks(True)) is not None:
        _pop_hooks()
        if _frame_of(top) is frame:
            break
        above.append(top)
    else:
        foreign = next((pair for pair in above if _frame_of(pair) is None), None)
        above = [pair for pair in above if pair is not foreign]
    for pack, unpack in reversed(above):
        _push_hooks(pack, unpack)


def _innermost() -> _Frame | None:
    top = top_hooks(True)
    return None if top is None else _frame_of(top)


def _frame_of(pair: tuple[Any, Any]) -> _Frame | None:
    owner = getattr(pair[0], "__self__", None)
    return owner if isinstance(owner, _Frame) else None


def _is_weight(tensor: Tensor) -> bool:
    """Weights stay where they are: moving them saves nothing, and they change under us."""
    base = tensor._base
    # To ask a plain tensor whether it is a parameter takes longer than all else here.
    if base is not None and isinstance(base, Parameter):
        return True
    return type(tensor) is not Tensor and isinstance(tensor, Parameter)
