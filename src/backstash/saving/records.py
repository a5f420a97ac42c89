"""What an autograd function saves for backward, and how it comes back.

Saved state is *data plus a record*.  Each value is taken apart into plain buffers, which
``ctx.save_for_backward`` keeps and any saved-tensor hook may move, compress or recompute;
and a record, which stays with the function and knows how to put the value together.

==================================  ==========================  ==============================
value                               what hooks see              what comes back
==================================  ==========================  ==============================
``None``                            nothing                     ``None``
plain tensor                        the tensor                  an equal tensor
parameter, distributed weight,      nothing: it is kept by      the same object
or given to :func:`keep_identity`   reference
wrapper subclass (quantized)        its buffers, codes as       an equal tensor of its class
                                    bytes
``GroupedTensor``                   its buffers, each with its  an equal one, tail unspecified
                                    valid length
==================================  ==========================  ==============================

A value kept by reference escapes autograd's check against in-place changes, so its version
is compared here instead.  A value given twice is saved once.  Nothing is taken from the
caller, and nothing is used up: a second backward finds what the first one found.

The hooks themselves are in :mod:`backstash.saving.hooks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from backstash.errors import CompileError, ConfigError, DtypeError, NothingSavedError, ShapeError
from backstash.opaque import is_compiled_around
from backstash.recompute import top_hooks
from backstash.saving.hooks import announce, is_saving
from backstash.saving.in_place import Fits, saved_in_place
from backstash.saving.marks import forget_marks, mark_once
from backstash.saving.slots import (
    AsGiven,
    Bytes,
    Constant,
    Grouped,
    OneByOne,
    Records,
    Reference,
    Repeated,
    WithParameters,
    Wrapper,
    as_given,
    layout_of,
)
from backstash.tensors import GroupedTensor, QuantizedTensor

_MARKER = "is_distributed_weight"
#: Whether the backward that runs now keeps what it reads for another one.
_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph  # pyright: ignore
_SHORT = 16
# Keyed by the object, weakly: an attribute on the tensor would be lost where it matters.
_KEPT: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


_NO_COMPILE = (
    "a distributed weight gathers itself while the model runs, which torch.compile cannot trace; "
    "wrap the forward of the module that holds it in torch.compiler.disable, or compile the "
    "model without it"
)


class _TraceError(CompileError, AssertionError):
    """Of the errors raised while tracing, torch.compile passes on an AssertionError as it is."""


def _refuse_trace() -> None:
    raise _TraceError(_NO_COMPILE)


# What torch.compiler.assume_constant_result sets; calling that would import all of the compiler.
# Without it the error would be traced, as a reason to run the frame uncompiled.
_refuse_trace._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _keep(tensor: Tensor) -> Reference:
    """Keep a tensor by reference; a distributed weight only where nothing is compiled."""
    if getattr(tensor, _MARKER, False) and is_compiled_around():
        raise CompileError(_NO_COMPILE)
    return Reference(tensor)


class _Packer:
    """Collects the buffers of one call, each once."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.plain: dict[int, tuple[int, Tensor]] = {}
        self.bytes: dict[int, tuple[int, Tensor]] = {}

    def slot(self, value: Any) -> Any:
        """The slot of one value that is not None."""
        if type(value) is GroupedTensor:
            if is_saving():
                mark_once(value)
            data, noted = self.slot(value.data), value.noted_overflow
            overflow = None if noted is None else self._append(noted)
            return Grouped(data, self._append(value.ends_G), overflow)
        if not isinstance(value, Tensor):
            raise DtypeError(
                f"only tensors, GroupedTensors and None can be saved for backward, got "
                f"{type(value).__name__}; keep other things in the function's plan"
            )
        if isinstance(value, Parameter) or getattr(value, _MARKER, False) or _is_kept(value):
            return _keep(value)
        if type(value) is not Tensor and is_traceable_wrapper_subclass(value):
            return self._wrapper(value)
        return self._append(value)

    def _wrapper(self, value: Tensor) -> Wrapper:
        names, kind = value.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
        ours = type(value) is QuantizedTensor
        parts = []
        for name in names:
            inner = getattr(value, name)
            if not isinstance(inner, Tensor):
                parts.append(Constant(inner))
            elif inner.dtype is torch.uint8:
                parts.append(self._append(inner))
            else:
                parts.append(self._bytes(inner) if _is_code(inner, ours=ours) else self.slot(inner))
        return Wrapper(value, parts, names, kind)

    def _append(self, tensor: Tensor) -> int:
        return self._index(self.plain, tensor, tensor)

    def _bytes(self, tensor: Tensor) -> Bytes:
        return Bytes(self._index(self.bytes, tensor, tensor.view(torch.uint8)), tensor.dtype)

    def _index(self, known: dict[int, tuple[int, Tensor]], tensor: Tensor, saved: Tensor) -> int:
        # The tensor is held with its index: the id of one that died could be another's.
        index, _ = known.setdefault(id(tensor), (len(self.tensors), tensor))
        if index == len(self.tensors):
            self.tensors.append(saved)
        return index


def _is_code(tensor: Tensor, *, ours: bool) -> bool:
    """Would a hook that compresses floats take this buffer of codes or scales for floats?"""
    if not tensor.dtype.is_floating_point or tensor.itemsize == 1:
        return tensor.dtype.is_floating_point
    return ours and tensor.ndim > 0 and tensor.stride(-1) == 1


def _is_kept(tensor: Tensor) -> bool:
    return bool(_KEPT) and tensor in _KEPT


def prepare_for_saving(*values: Any) -> tuple[tuple[Tensor | None, ...], Records]:
    """Take values apart into what hooks may see and a record of how to put them together.

    The values are not changed and stay usable.  A value given twice is saved once.

    Returns:
        Tensors for ``ctx.save_for_backward`` and the records for :func:`restore_from_saved`.

    Raises:
        DtypeError: A value is neither a tensor, a ``GroupedTensor`` nor ``None``.
        CompileError: ``torch.compile`` is tracing and a value is a distributed weight.
    """
    if torch.compiler.is_compiling():
        return _prepare_traced(values)
    count = len(values)
    kinds = [*map(type, values)]
    layout = None if kinds.count(Tensor) == count else layout_of(tuple(kinds))
    if _KEPT.data or (layout and (not layout.common or is_compiled_around())):
        return _prepare_each(values)
    # No value is asked whether it is a distributed weight: its class says so, or is none that
    # comes to here.
    if (count <= _SHORT or top_hooks(True) is not None) and _repeats(values):
        return _prepare_each(values)
    if layout is None or layout.tensor_count == count:
        return values, as_given(count)
    return layout.tensors(values), WithParameters(layout, values)


def _repeats(values: tuple[Any, ...]) -> bool:
    """Is a tensor given twice?

    Asked wherever that can be noticed.  To look through a long list would be half of the cost
    of saving it, and without hooks autograd keeps a second mention of a tensor for nothing
    and gives the one object back.
    """
    given = [id(value) for value in values if value is not None]
    return len(set(given)) != len(given)


def _prepare_each(values: tuple[Any, ...]) -> tuple[tuple[Tensor | None, ...], Records]:
    forget_marks()
    packer = _Packer()
    position_of: dict[int, int] = {}
    slots: list[Any] = []
    for position, value in enumerate(values):
        if value is None:
            slots.append(None)
            continue
        first = position_of.setdefault(id(value), position)
        slots.append(packer.slot(value) if first == position else Repeated(first))
    records = OneByOne(slots, len(packer.tensors), is_offered=is_saving())
    return tuple(packer.tensors), records


def _prepare_traced(values: tuple[Any, ...]) -> tuple[tuple[Tensor | None, ...], Records]:
    """While tracing, autograd's own bookkeeping is exact for whatever is a plain tensor."""
    for value in values:
        if value is not None and getattr(value, _MARKER, False):
            _refuse_trace()
    return values, AsGiven(len(values))


def restore_from_saved(records: Records, tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Put values together again, in the order in which they were given.

    Raises:
        ShapeError: ``tensors`` are not as many as were saved.
        NothingSavedError: ``records`` are not those of :func:`prepare_for_saving`.
        DtypeError: ``tensors`` are no sequence.
        ModifiedError: A value kept by reference was changed in place since.
    """
    if type(records) is AsGiven and type(tensors) is tuple and len(tensors) == records.tensor_count:
        return tensors
    # No isinstance with an abstract class where it can be helped: this runs at every backward.
    count = getattr(records, "tensor_count", None)
    if count is None:
        raise NothingSavedError(
            f"restore_from_saved needs the records that prepare_for_saving returned beside the "
            f"tensors, got {type(records).__name__}; give records first, tensors second"
        )
    if type(tensors) is not tuple and not isinstance(tensors, Sequence):
        raise DtypeError(
            f"restore_from_saved needs a sequence of tensors, got {type(tensors).__name__}; "
            f"give all of ctx.saved_tensors, in order"
        )
    if len(tensors) != count:
        raise ShapeError(
            f"{count} tensors were prepared for saving, got {len(tensors)} back; "
            f"give all of ctx.saved_tensors, in order"
        )
    return records.restore(tensors)


def save_for_backward(ctx: Any, *values: Any) -> None:
    """Save values of an ``autograd.Function`` for its backward; call it once, in forward.

    Raises:
        DtypeError: A value is neither a tensor, a ``GroupedTensor`` nor ``None``.
        CompileError: ``torch.compile`` is tracing and a value is a distributed weight.
        ConfigError: ``ctx`` is no context of a function.
    """
    if torch.compiler.is_compiling():
        tensors, ctx.tensor_objects = prepare_for_saving(*values)
    else:
        if not hasattr(ctx, "save_for_backward"):
            raise ConfigError(
                f"save_for_backward needs the ctx of an autograd.Function, got "
                f"{type(ctx).__name__}; call it in forward as save_for_backward(ctx, *values)"
            )
        tensors, ctx.tensor_objects = prepare_for_saving(*values)
        announce(tensors)
    ctx.save_for_backward(*tensors)


def saved_values(ctx: Any) -> tuple[Any, ...]:
    """The values that :func:`save_for_backward` saved, in order; each buffer is unpacked once.

    Raises:
        NothingSavedError: Nothing was saved with :func:`save_for_backward`.
        ModifiedError: A value kept by reference was changed in place since.
    """
    return restore_from_saved(_records_of(ctx), ctx.saved_tensors)


def _records_of(ctx: Any) -> Records:
    records = getattr(ctx, "tensor_objects", None)
    if records is None:
        raise NothingSavedError(
            "saved_values needs a ctx on which save_for_backward(ctx, ...) was called in forward, "
            "got one without records; call backstash.save_for_backward there, not ctx's own"
        )
    return records


def taken_values(
    ctx: Any, in_place: Mapping[int, Fits] = MappingProxyType({})
) -> tuple[tuple[Any, ...], bool]:
    """:func:`saved_values`, and whether autograd has let go of them: the graph is not retained.

    Then what is no longer read can go before backward has ended, which is when autograd would
    let go of it; and what no hook has seen either may be written.

    Args:
        in_place: By position, values that may come back as
            :class:`~backstash.kernels.PagedRows` where they fit; all others are values.

    Raises:
        NothingSavedError, ModifiedError: as :func:`saved_values` does.
    """
    records = _records_of(ctx)
    places = {
        place: fits
        for position, fits in in_place.items()
        if (place := records.place_of(position)) is not None
    }
    tensors = saved_in_place(ctx, places) if places else ctx.saved_tensors
    values = restore_from_saved(records, tensors)
    ctx.maybe_clear_saved_tensors()
    return values, not _keeps_graph()


restore_from_func_ctx = saved_values


def keep_identity(tensor: Tensor) -> Tensor:
    """Ask that this very object comes back in backward; it is kept by reference from now on.

    Meant for leaves such as weights: hooks never see the tensor, so an activation kept like
    this cannot be offloaded, and an output kept like this would hold its own graph.

    Returns:
        The tensor itself.

    Raises:
        DtypeError: It is no tensor.
    """
    if not isinstance(tensor, Tensor):
        raise DtypeError(f"keep_identity needs a tensor, got {type(tensor).__name__}")
    _KEPT[tensor] = True
    return tensor
