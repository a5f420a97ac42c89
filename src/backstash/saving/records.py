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

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from backstash.errors import CompileError, DtypeError, ModifiedError, NothingSavedError, ShapeError
from backstash.saving.marks import mark_rows
from backstash.tensors import GroupedTensor, QuantizedTensor

_MARKER = "is_distributed_weight"
_PLAIN_TYPES = frozenset((Tensor, type(None)))
# Keyed by the object, weakly: an attribute on the tensor would be lost where it matters.
_KEPT: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class Records:
    """How to put the values of one :func:`prepare_for_saving` together again."""

    __slots__ = ("slots", "tensor_count")

    def __init__(self, slots: list[Any] | None, tensor_count: int) -> None:
        #: None where every value was saved as it was, in order.
        self.slots = slots
        self.tensor_count = tensor_count


class _Reference:
    """The object itself, and the version that it had."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = None if tensor.is_inference() else tensor._version

    def restore(self, tensors: Sequence[Tensor | None], values: list[Any]) -> Tensor:
        if self.version is not None and self.tensor._version != self.version:
            raise ModifiedError(
                f"a value of shape {tuple(self.tensor.shape)} kept by reference for backward was "
                f"modified in place: it is at version {self.tensor._version}, expected "
                f"{self.version}; run backward before the change (optimizer.step(), say), or "
                f"change a clone"
            )
        return self.tensor


class _Again:
    """The value that was already given at an earlier position."""

    __slots__ = ("position",)

    def __init__(self, position: int) -> None:
        self.position = position

    def restore(self, tensors: Sequence[Tensor | None], values: list[Any]) -> Any:
        return values[self.position]


class _Bytes:
    """A buffer of codes, which hooks see as bytes."""

    __slots__ = ("dtype", "index")

    def __init__(self, index: int, dtype: torch.dtype) -> None:
        self.index = index
        self.dtype = dtype

    def restore(self, tensors: Sequence[Tensor | None], values: list[Any]) -> Tensor:
        return _tensor_at(tensors, self.index).view(self.dtype)


class _Wrapper:
    """A wrapper subclass, by its flatten protocol."""

    __slots__ = ("kind", "names", "parts", "size", "stride", "tensor_class")

    def __init__(self, tensor: Tensor, parts: list[Any], names: list[str], kind: Any) -> None:
        self.tensor_class = type(tensor)
        self.parts = parts
        self.names = names
        self.kind = kind
        self.size = tensor.size()
        self.stride = tensor.stride()

    def restore(self, tensors: Sequence[Tensor | None], values: list[Any]) -> Tensor:
        inner = {
            name: _restore(part, tensors, values)
            for name, part in zip(self.names, self.parts, strict=True)
        }
        unflatten = self.tensor_class.__tensor_unflatten__  # pyright: ignore
        return unflatten(inner, self.kind, self.size, self.stride)


class _Grouped:
    """A ``GroupedTensor``: its rows and their ends."""

    __slots__ = ("data", "ends", "overflow")

    def __init__(self, data: Any, ends: Any, overflow: Any) -> None:
        self.data = data
        self.ends = ends
        self.overflow = overflow

    def restore(self, tensors: Sequence[Tensor | None], values: list[Any]) -> GroupedTensor:
        return GroupedTensor.from_parts(
            _restore(self.data, tensors, values),
            _restore(self.ends, tensors, values),
            _restore(self.overflow, tensors, values),
        )


class _Packer:
    """Collects the buffers of one call, each once."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.index_of: dict[int, int] = {}

    def slot(self, value: Any) -> Any:
        """The record of one value: an index into the tensors, None, or an object."""
        if value is None:
            return None
        if isinstance(value, GroupedTensor):
            return self._grouped(value)
        if not isinstance(value, Tensor):
            raise DtypeError(
                f"only tensors, GroupedTensors and None can be saved for backward, got "
                f"{type(value).__name__}; keep other things in the function's plan"
            )
        if isinstance(value, Parameter) or getattr(value, _MARKER, False) or value in _KEPT:
            return _Reference(value)
        if is_traceable_wrapper_subclass(value):
            return self._wrapper(value)
        return self._append(value)

    def _append(self, tensor: Tensor) -> int:
        index = self.index_of.setdefault(id(tensor), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(tensor)
        return index

    def _codes(self, tensor: Tensor) -> Any:
        """A hook that compresses floats must not take codes, or their scales, for floats."""
        if not tensor.dtype.is_floating_point or tensor.ndim == 0 or tensor.stride(-1) != 1:
            return self.slot(tensor)
        self.index_of.setdefault(id(tensor), len(self.tensors))
        index = self.index_of[id(tensor)]
        if index == len(self.tensors):
            self.tensors.append(tensor.view(torch.uint8))
        return _Bytes(index, tensor.dtype)

    def _wrapper(self, value: Tensor) -> _Wrapper:
        names, kind = value.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
        ours = isinstance(value, QuantizedTensor)
        parts = []
        for name in names:
            inner = getattr(value, name)
            as_bytes = ours or inner.dtype.itemsize == 1
            parts.append(self._codes(inner) if as_bytes else self.slot(inner))
        return _Wrapper(value, parts, names, kind)

    def _grouped(self, value: GroupedTensor) -> _Grouped:
        mark_rows(value)
        data = self.slot(value.data)
        return _Grouped(data, self._append(value.ends_G), self._append(value.overflow))


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
    kinds = set(map(type, values))
    if kinds <= _PLAIN_TYPES and not _KEPT:
        distinct = len(set(map(id, values)))
        nones = list(map(type, values)).count(type(None)) if type(None) in kinds else 0
        marked = [1 for value in values if getattr(value, _MARKER, False)]
        if not marked and distinct == len(values) - max(nones - 1, 0):
            return values, Records(None, len(values))
    return _prepare_each(values)


def _prepare_each(values: tuple[Any, ...]) -> tuple[tuple[Tensor | None, ...], Records]:
    packer = _Packer()
    position_of: dict[int, int] = {}
    slots: list[Any] = []
    for position, value in enumerate(values):
        if type(value) is Parameter and not _KEPT and id(value) not in position_of:
            position_of[id(value)] = position
            slots.append(_Reference(value))
            continue
        first = position if value is None else position_of.setdefault(id(value), position)
        slots.append(packer.slot(value) if first == position else _Again(first))
    return tuple(packer.tensors), Records(slots, len(packer.tensors))


def _prepare_traced(values: tuple[Any, ...]) -> tuple[tuple[Tensor | None, ...], Records]:
    """While tracing, autograd's own bookkeeping is exact for whatever is a plain tensor."""
    for value in values:
        if value is not None and getattr(value, _MARKER, False):
            raise CompileError(_NO_COMPILE)
    return values, Records(None, len(values))


_NO_COMPILE = (
    "a distributed weight gathers itself while the model runs, which torch.compile cannot trace; "
    "leave the module that holds it out with torch.compiler.disable, or compile the model "
    "before sharding it"
)


def restore_from_saved(records: Records, tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Put values together again, in the order in which they were given.

    Raises:
        ShapeError: ``tensors`` are not as many as were saved.
        ModifiedError: A value kept by reference was changed in place since.
    """
    if len(tensors) != records.tensor_count:
        raise ShapeError(
            f"{records.tensor_count} tensors were prepared for saving, got {len(tensors)} back; "
            f"give all of ctx.saved_tensors, in order"
        )
    if records.slots is None:
        return tuple(tensors)
    values: list[Any] = []
    for slot in records.slots:
        if type(slot) is int:
            values.append(tensors[slot])
        elif slot is None:
            values.append(None)
        else:
            values.append(slot.restore(tensors, values))
    return tuple(values)


def _restore(slot: Any, tensors: Sequence[Tensor | None], values: list[Any]) -> Any:
    return _tensor_at(tensors, slot) if type(slot) is int else slot.restore(tensors, values)


def _tensor_at(tensors: Sequence[Tensor | None], index: int) -> Tensor:
    tensor = tensors[index]
    if tensor is None:
        raise ShapeError(f"saved tensor {index} came back as None; a hook lost it")
    return tensor


def save_for_backward(ctx: Any, *values: Any) -> None:
    """Save values of an ``autograd.Function`` for its backward; call it once, in forward.

    Raises:
        DtypeError: A value is neither a tensor, a ``GroupedTensor`` nor ``None``.
        CompileError: ``torch.compile`` is tracing and a value is a distributed weight.
    """
    tensors, ctx.tensor_objects = prepare_for_saving(*values)
    ctx.save_for_backward(*tensors)


def saved_values(ctx: Any) -> tuple[Any, ...]:
    """The values that :func:`save_for_backward` saved, in order; each buffer is unpacked once.

    Raises:
        NothingSavedError: Nothing was saved with :func:`save_for_backward`.
        ModifiedError: A value kept by reference was changed in place since.
    """
    records = getattr(ctx, "tensor_objects", None)
    if records is None:
        raise NothingSavedError(
            "saved_values needs a ctx on which save_for_backward(ctx, ...) was called in forward, "
            "got one without records; call backstash.save_for_backward there, not ctx's own"
        )
    return restore_from_saved(records, ctx.saved_tensors)


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
