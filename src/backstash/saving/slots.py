"""How saved values are put together again: the records, and their slots.

A record belongs to one call of :func:`~backstash.saving.prepare_for_saving` and holds no
buffer, so what it describes is freed with the graph.  The two common cases are records of
their own, walked by C code; everything else has a slot for each value, and each kind of
slot restores one kind of value.
"""

from __future__ import annotations

import abc
import functools
import operator
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from backstash.errors import ModifiedError, ShapeError
from backstash.kernels import InPages
from backstash.tensors import GroupedTensor


class Records(abc.ABC):
    """How to put the values of one :func:`prepare_for_saving` together again."""

    __slots__ = ("tensor_count",)

    def __init__(self, tensor_count: int) -> None:
        self.tensor_count = tensor_count

    @abc.abstractmethod
    def restore(self, tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """The values, from as many tensors as were saved."""

    def place_of(self, position: int) -> int | None:
        """The tensor that the value at ``position`` is, if that may come back in pages."""
        return None


class AsGiven(Records):
    """Every value was saved as it was, in order."""

    __slots__ = ()

    def restore(self, tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """The tensors that came back."""
        return tuple(tensors)


as_given = functools.lru_cache(maxsize=1024)(AsGiven)


class WithParameters(Records):
    """Parameters by reference among values that were saved as they were."""

    __slots__ = ("merge", "parameters", "versions")

    def __init__(self, layout: Layout, values: tuple[Any, ...]) -> None:
        self.tensor_count = layout.tensor_count
        self.merge = layout.merge
        self.parameters = layout.parameters(values)
        self.versions = [*map(_version, self.parameters)]

    def restore(self, tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """The parameters and the tensors that came back, in the order of the values."""
        if [*map(_version, self.parameters)] != self.versions:
            for parameter, version in zip(self.parameters, self.versions, strict=True):
                _check_version(parameter, version)
        return self.merge((*self.parameters, *tensors))


class Layout(NamedTuple):
    """Where the parameters are among values of some types, as functions that run in C.

    Distributed weights count as parameters where their class says what they are.  ``common``
    says that there are only parameters, plain tensors and None.
    """

    parameters: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    tensors: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    merge: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    tensor_count: int
    common: bool


@functools.lru_cache(maxsize=256)
def layout_of(kinds: tuple[type, ...]) -> Layout:
    """The layout of values of these types; a module asks for the same one at every call."""
    parameters = [i for i, kind in enumerate(kinds) if _is_kept_whole(kind)]
    others = [i for i, kind in enumerate(kinds) if not _is_kept_whole(kind)]
    place = {position: i for i, position in enumerate(parameters + others)}
    merge = _picker([place[i] for i in range(len(kinds))])
    common = all(kind is Tensor or kind is NoneType or _is_kept_whole(kind) for kind in kinds)
    return Layout(_picker(parameters), _picker(others), merge, len(others), common)


def _is_kept_whole(kind: type) -> bool:
    """Are all values of this type kept by reference?"""
    marked = getattr(kind, "is_distributed_weight", False) is True
    return issubclass(kind, Parameter) or (marked and issubclass(kind, Tensor))


def _picker(indices: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda values: tuple([values[i] for i in indices])


_version = operator.attrgetter("_version")


class OneByOne(Records):
    """A slot for each value: an index into the tensors, None, or an object that restores.

    ``is_offered`` says that the innermost hooks were those of a ``saving`` context.
    """

    __slots__ = ("is_offered", "slots")

    def __init__(self, slots: list[Any], tensor_count: int, *, is_offered: bool = False) -> None:
        super().__init__(tensor_count)
        self.slots = slots
        self.is_offered = is_offered

    def place_of(self, position: int) -> int | None:
        """The tensor of a plain value, or that of the rows of a ``GroupedTensor``."""
        slot = self.slots[position]
        if type(slot) is Grouped:
            slot = slot.data
        return slot if self.is_offered and type(slot) is int else None

    def restore(self, tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """The value."""
        values: list[Any] = []
        for slot in self.slots:
            values.append(None if slot is None else _restore(slot, tensors, values))
        return tuple(values)


def _check_version(tensor: Tensor, version: int | None) -> None:
    if version is not None and tensor._version != version:
        raise ModifiedError(
            f"a value of shape {tuple(tensor.shape)} kept by reference for backward was modified "
            f"in place: it is at version {tensor._version}, expected {version}; run backward "
            f"before the change (optimizer.step(), say), or change a clone"
        )


class Reference:
    """The object itself, and the version that it had."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = None if tensor.is_inference() else tensor._version

    def restore(self, tensors: Sequence[Tensor | None], values: list[Any]) -> Tensor:
        """The value."""
        _check_version(self.tensor, self.version)
        return self.tensor


class Repeated:
    """A value that was given at an earlier position too."""

    __slots__ = ("position",)

    def __init__(self, position: int) -> None:
        self.position = position

    def restore(self, tensors: Sequence[Tensor | None], values: list[Any]) -> Any:
        """The value."""
        return values[self.position]


class Constant:
    """What a wrapper holds beside its buffers and hooks never see, such as a mesh of devices."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def restore(self, tensors: Sequence[Tensor | None], values: list[Any]) -> Any:
        """The value."""
        return self.value


class Bytes:
    """A buffer of codes, which hooks see as bytes."""

    __slots__ = ("dtype", "index")

    def __init__(self, index: int, dtype: torch.dtype) -> None:
        self.index = index
        self.dtype = dtype

    def restore(self, tensors: Sequence[Tensor | None], values: list[Any]) -> Tensor:
        """The value."""
        return _tensor_at(tensors, self.index).view(self.dtype)


class Wrapper:
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
        """The value."""
        inner = {
            name: _restore(part, tensors, values)
            for name, part in zip(self.names, self.parts, strict=True)
        }
        unflatten = self.tensor_class.__tensor_unflatten__  # pyright: ignore
        return unflatten(inner, self.kind, self.size, self.stride)


class Grouped:
    """A ``GroupedTensor``: its rows and their ends; rows in pages come back as they are."""

    __slots__ = ("data", "ends", "overflow")

    def __init__(self, data: Any, ends: Any, overflow: Any) -> None:
        self.data = data
        self.ends = ends
        self.overflow = overflow

    def restore(
        self, tensors: Sequence[Tensor | None], values: list[Any]
    ) -> GroupedTensor | InPages:
        """The value."""
        data = _restore(self.data, tensors, values)
        if isinstance(data, InPages):
            return data
        ends_G = _restore(self.ends, tensors, values)
        if self.overflow is None:
            return GroupedTensor.from_parts(data, ends_G)
        return GroupedTensor.from_parts(data, ends_G, _restore(self.overflow, tensors, values))


def _restore(slot: Any, tensors: Sequence[Tensor | None], values: list[Any]) -> Any:
    return _tensor_at(tensors, slot) if type(slot) is int else slot.restore(tensors, values)


def _tensor_at(tensors: Sequence[Tensor | None], index: int) -> Tensor:
    tensor = tensors[index]
    if tensor is None:
        raise ShapeError(f"saved tensor {index} came back as None; a hook lost it")
    return tensor
