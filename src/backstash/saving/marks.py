"""The valid length of a buffer: how many of its rows are real.

A buffer sized for the worst case carries its length as an integer ``(1,)`` on the device,
counted in rows of dimension 0.  The mark belongs to the storage, not to the Python object,
because autograd saves other objects (detached, viewed) than those a user marks.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from backstash.errors import DeviceError, DtypeError, LayoutError, ShapeError
from backstash.tensors import GroupedTensor, QuantizedTensor

_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.uint8, torch.int8)


class _Mark(NamedTuple):
    """Which rows of which view of a storage are real."""

    offset: int
    stride: int
    size: int
    rows: Tensor


# Of each marked storage, by its id, a weak reference to it and its mark, which go when it goes.
# Nearly every tensor that is saved is looked up and has none: that is one look into a dict.
_Marks = dict[int, tuple["weakref.ref[UntypedStorage]", _Mark]]
_MARKS: _Marks = {}


class _Once(threading.local):
    """Marks for what the node whose saving is under way saves next on this thread."""

    def __init__(self) -> None:
        self.marks: _Marks = {}


_once = _Once()


def mark_grouped_tensor(value: Tensor | GroupedTensor, rows: Tensor | None = None) -> None:
    """Say that a buffer is valid only for its first ``rows`` rows.

    Handlers of :class:`saving` are told so when autograd saves the buffer, or a view of it
    that has the same rows.  Nothing is stuck on the tensor, and the mark goes with its storage.

    Args:
        value: ``(T, ...)`` with whole rows one after another; a ``GroupedTensor`` knows its rows.
        rows: Integer of one element on the device of ``value``; more than T counts as T.

    Raises:
        LayoutError: The valid rows of ``value`` are no prefix of its bytes.
        DtypeError: ``rows`` is missing or no integer of one element.
        DeviceError: ``rows`` is on another device.
        ShapeError: ``rows`` is negative, where the host can see it.
    """
    if isinstance(value, GroupedTensor):
        if rows is not None:
            raise LayoutError("a GroupedTensor knows its own rows; leave `rows` out")
        _mark_buffers(value)
        return
    if not isinstance(value, Tensor) or is_traceable_wrapper_subclass(value):
        raise LayoutError(
            f"mark_grouped_tensor needs a plain tensor or a GroupedTensor, got "
            f"{type(value).__name__}; quantize a GroupedTensor to have each buffer's length known"
        )
    if not isinstance(rows, Tensor) or rows.numel() != 1 or rows.dtype not in _INTEGERS:
        came = f"{rows.dtype} of {rows.numel()}" if isinstance(rows, Tensor) else repr(rows)
        raise DtypeError(
            f"rows must be an integer tensor of one element on {value.device}, got {came}; give "
            f"the number of valid rows"
        )
    if rows.device != value.device:
        raise DeviceError(
            f"rows must be on the device of the buffer, {value.device}, got {rows.device}; "
            f"move it there once, not at every step"
        )
    if rows.is_cpu and int(rows) < 0:
        raise ShapeError(
            f"rows must be zero or more, got {int(rows)}; give the number of valid rows"
        )
    _mark(value, rows)


def mark_once(value: GroupedTensor) -> None:
    """Mark the buffers of a grouped tensor for the node that is about to save them.

    Its rows may be the caller's own tensor, which another node saves whole: so a plain
    buffer is marked for one save.  The buffers of a quantized one are nobody else's.
    """
    if isinstance(value.data, QuantizedTensor):
        _mark_buffers(value)
    else:
        _set(_once.marks, value.data, _mark_of(value.data, value.ends_G[-1:]))


def spend_mark(tensor: Tensor) -> None:
    """The node has saved ``tensor``: what was marked for this once is over."""
    if _once.marks and _has_rows(tensor):
        _once.marks.pop(id(tensor.untyped_storage()), None)


def forget_marks() -> None:
    """A new node is saved: what an earlier one marked and never saved is over."""
    if _once.marks:
        _once.marks.clear()


def valid_rows(tensor: Tensor) -> Tensor | None:
    """The valid length that was marked for this buffer, or None."""
    once = _once.marks
    if not (_MARKS or once) or (type(tensor) is not Tensor and not _has_rows(tensor)):
        return None
    if tensor.layout is not torch.strided:
        return None
    storage = tensor.untyped_storage()
    entry = (once.get(id(storage)) if once else None) or _MARKS.get(id(storage))
    if entry is None or entry[0]() is not storage or tensor.ndim == 0:
        return None
    mark = entry[1]
    same_rows = tensor.shape[0] == mark.size and tensor.stride(0) * tensor.itemsize == mark.stride
    first_row = 0 <= tensor.storage_offset() * tensor.itemsize - mark.offset < max(mark.stride, 1)
    return mark.rows if same_rows and first_row else None


def _mark_buffers(value: GroupedTensor) -> None:
    if not isinstance(value.data, QuantizedTensor):
        _mark(value.data, value.ends_G[-1:])
        return
    for name, buffer in value.data.buffers.items():
        rows = value.data.format.valid_rows(name, value.ends_G, value.capacity)
        if rows is not None:
            _mark(buffer, rows)


def _mark(buffer: Tensor, rows: Tensor) -> None:
    _set(_MARKS, buffer, _mark_of(buffer, rows))


def _set(marks: _Marks, buffer: Tensor, mark: _Mark) -> None:
    storage = buffer.untyped_storage()
    key = id(storage)
    marks[key] = weakref.ref(storage, functools.partial(_forget, marks, key)), mark


def _forget(marks: _Marks, key: int, reference: weakref.ref[UntypedStorage]) -> None:
    """A storage is gone: so is its mark, unless another has got its id and a mark since."""
    entry = marks.get(key)
    if entry is not None and entry[0] is reference:
        del marks[key]


def _mark_of(buffer: Tensor, rows: Tensor) -> _Mark:
    if buffer.ndim == 0 or not _has_rows(buffer) or not buffer.is_contiguous():
        came = buffer.stride() if buffer.layout is torch.strided else buffer.layout
        raise LayoutError(
            f"the valid rows of a buffer must be a prefix of its bytes, got shape "
            f"{tuple(buffer.shape)} with strides {came}; mark a contiguous tensor whose "
            f"dimension 0 is the rows"
        )
    item = buffer.itemsize
    offset, stride = int(buffer.storage_offset()) * item, buffer.stride(0) * item
    return _Mark(offset, stride, len(buffer), rows.detach().reshape(1))


def _has_rows(tensor: Tensor) -> bool:
    """Is there one storage with rows in it?  Not of a sparse tensor, nor of a wrapper."""
    return tensor.layout is torch.strided and not isinstance(tensor, QuantizedTensor)
