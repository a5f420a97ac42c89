"""What a checkpointed region must not compute again.

``torch.utils.checkpoint`` runs a part of the forward a second time during backward.  Three
things would come out differently then: the recipe in force (its ``autocast`` has been left
by that time), the scale of delayed scaling (it may have moved on), and the choice of experts
(near ties fall the other way when anything rounds differently).  So the forward *remembers*
them, and the second run is given what the first one had.

The memory belongs to the region, found by looking at who called us: a frame of one of
torch's own checkpoint functions, which holds an object that lives as long as the region
can be run again.  The memory is keyed weakly by that object, so it goes with the graph.
Both modes of ``torch.utils.checkpoint`` are known, nested in any way.
"""

from __future__ import annotations

import enum
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils import checkpoint as torch_checkpoint

from backstash.errors import RecomputeError

T = TypeVar("T")
Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]
_autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]


#: ``top_hooks(True)`` is the innermost pair of saved-tensor hooks in force, or None.
top_hooks: Callable[[bool], Hooks | None] = _autograd._top_saved_tensors_default_hooks


class Run(enum.Enum):
    """Whether a region runs for the first time or again."""

    FORWARD = "forward"
    #: Without grad, though backward will come to it: the first run of a reentrant region.
    BLIND_FORWARD = "forward without grad"
    RECOMPUTE = "recompute"


class _Region:
    """The values that one checkpointed call remembers, in the order of its forward."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        # Each backward runs the region from its start, so it has a place of its own to read from.
        self._next: dict[Any, int] = {}

    def recall(self, backward: Any) -> Any:
        index = self._next.get(backward, 0)
        if index >= len(self.values):
            raise RecomputeError(
                f"a checkpointed region was recomputed with more calls of backstash modules than "
                f"its forward had, {len(self.values)}; the function must do the same both times"
            )
        self._next[backward] = index + 1
        return self.values[index]


_REGIONS: weakref.WeakKeyDictionary[Any, _Region] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def remember(compute: Callable[[], T]) -> T:
    """``compute()``; in the recomputation of a checkpointed region, what it gave in forward.

    The value should be small and must not require grad: it lives as long as the region.

    Raises:
        RecomputeError: The recomputation asks for more values than the forward had, or this
            version of torch keeps its checkpoints in a way that is not known here.
    """
    if torch.compiler.is_compiling() or not _may_be_checkpointed():
        return compute()
    forwards: list[_Region] = []
    for region, run, backward in _regions():
        if run is Run.RECOMPUTE:
            value = region.recall(backward)
            break
        forwards.append(region)
    else:
        value = compute()
    for region in forwards:
        region.values.append(value)
    return value


def is_recomputing() -> bool:
    """Is this the second run of a checkpointed region?"""
    return any(run is Run.RECOMPUTE for _, run, _ in _regions())


def in_checkpoint() -> bool:
    """Is grad off only because this is the first run of a checkpointed region?

    A reentrant region runs its forward without grad, and backward comes to it all the same;
    under ``no_grad`` it does not, and nobody should learn from it.
    """
    return any(run is Run.BLIND_FORWARD for _, run, _ in _regions())


def _may_be_checkpointed() -> bool:
    """A cheap answer that is never wrongly no: walking the stack costs microseconds.

    A region without reentry has its hooks in force; a reentrant one runs without grad in
    forward, and inside a backward pass when recomputed.
    """
    return (
        not torch.is_grad_enabled()
        or torch._C._current_graph_task_id() != -1
        or top_hooks(True) is not None
    )


def _regions() -> Iterator[tuple[_Region, Run, Any]]:
    """The regions that this call is in, innermost first, and for which backward they run again."""
    if not _may_be_checkpointed():
        return
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        # Code that is hashed is read from end to end.
        find = _FINDERS.get(id(frame.f_code))
        if find is not None:
            owner, run, backward = find(frame)
            if owner is not None:
                with _lock:
                    region = _REGIONS.setdefault(owner, _Region())
                yield region, run, backward
        frame = frame.f_back


_Found = tuple[Any, Run, Any]


def _reentrant_forward(frame: types.FrameType) -> _Found:
    node = frame.f_locals["ctx"]
    return node, Run.BLIND_FORWARD if node.next_functions else Run.FORWARD, None


def _reentrant_backward(frame: types.FrameType) -> _Found:
    return frame.f_locals["ctx"], Run.RECOMPUTE, torch._C._current_graph_task_id()


def _without_reentry_forward(frame: types.FrameType) -> _Found:
    generator = frame.f_locals.get("gen")
    if generator is None or generator.gi_frame is None:
        return None, Run.FORWARD, None
    return generator.gi_frame.f_locals["new_frame"], Run.FORWARD, None


def _without_reentry_recompute(frame: types.FrameType) -> _Found:
    # Torch's own name for the backward: it makes one up where a tensor is unpacked outside of any.
    return frame.f_locals["frame"], Run.RECOMPUTE, frame.f_locals["gid"]


def _find_finders() -> dict[types.CodeType, Callable[[types.FrameType], _Found]]:
    """The code objects of torch's checkpoint, and where each keeps the region's object."""
    function = torch_checkpoint.CheckpointFunction
    hooks = torch_checkpoint._checkpoint_hook.__init__.__code__
    unpack = next((c for c in hooks.co_consts if getattr(c, "co_name", "") == "unpack_hook"), None)
    forward = inspect.unwrap(torch_checkpoint.checkpoint).__code__
    generator = torch_checkpoint._checkpoint_without_reentrant_generator.__code__
    if (
        unpack is None
        or "frame" not in unpack.co_freevars
        or "gid" not in unpack.co_varnames
        or "gen" not in forward.co_varnames
        or "new_frame" not in generator.co_varnames + generator.co_cellvars
    ):
        raise RecomputeError(
            f"torch {torch.__version__} keeps its checkpoints in a way that backstash does not "
            f"know; use a version of torch that backstash was tested with (2.11 to 2.13)"
        )
    return {
        inspect.unwrap(function.forward).__code__: _reentrant_forward,
        inspect.unwrap(function.backward).__code__: _reentrant_backward,
        forward: _without_reentry_forward,
        unpack: _without_reentry_recompute,
    }


# The functions that these are of stay, and so do their ids.
_FINDERS = {id(code): find for code, find in _find_finders().items()}
