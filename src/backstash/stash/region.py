"""Which bytes of a storage a saved tensor needs, and how it is put together from them again.

What is copied is a run of whole rows that starts where the valid rows start.  A contiguous
tensor is its own bytes.  A view of some columns of a larger buffer (a gate and its partner,
say) is not one run of bytes, so the buffer is taken as a whole, once for all of its views.
Whatever has no such run is refused, never half-copied.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class View(NamedTuple):
    """A tensor as a view of a buffer of bytes."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, buffer: Tensor) -> Tensor:
        """The tensor in ``buffer``, which is uint8 of one dimension."""
        values = buffer.view(self.dtype)
        offset = int(values.storage_offset()) + self.offset
        return values.as_strided(self.size, self.stride, offset)

    def is_all_of(self, nbytes: int) -> bool:
        """Is it so many bytes, row after row?"""
        return (
            self.offset == 0
            and self.size.numel() * self.dtype.itemsize == nbytes
            and self.stride == contiguous_stride(self.size)
        )


class Place(NamedTuple):
    """A run of bytes of one storage: two tensors with the same place are aliases."""

    storage: int
    start: int
    nbytes: int


class Content(NamedTuple):
    """What a buffer in pages is a copy of: the same again need not be copied.

    ``valid`` tells which rows: bytes of one, and the address and version of their number.
    """

    place: Place
    packed: torch.dtype
    valid: tuple[int, int, int | None] | None

    def in_any(self) -> tuple[Content, ...]:
        """What a buffer may be a copy of that has all of this: the same, or all rows."""
        return (self,) if self.valid is None else (self, Content(self.place, self.packed, None))


class Region(NamedTuple):
    """The bytes that a saved tensor needs.

    ``version`` is that of the tensor, so that the same place with other content differs.
    ``is_own`` says that they are the tensor's own, in order.
    """

    row_bytes: int
    place: Place
    view: View
    version: int | None
    is_own: bool

    def bytes_of(self, tensor: Tensor) -> Tensor:
        """The bytes, of the tensor that the region is of, without its graph."""
        if self.is_own:
            return tensor.view(-1).view(torch.uint8)
        with torch.no_grad():
            buffer = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            where = self.place.start, (self.place.nbytes,), (1,)
            storage = tensor.untyped_storage()
            return buffer.set_(storage, *where)  # pyright: ignore[reportArgumentType]

    def is_of(self, tensor: Tensor) -> bool:
        """Would the region of this tensor be the same?"""
        view, place = self.view, self.place
        return (
            tensor.untyped_storage()._cdata == place.storage
            and tensor.dtype is view.dtype
            and int(tensor.storage_offset()) * view.dtype.itemsize
            == place.start + view.offset * view.dtype.itemsize
            and tensor.shape == view.size
            and tensor.stride() == view.stride
            and _version_of(tensor) == self.version
        )


def region_of(tensor: Tensor, *, marked: bool) -> Region | None:
    """The region of a tensor, or None where its bytes are no run that could be copied.

    With ``marked`` only the first rows are real, so these must be a prefix of the region.
    """
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    if tensor.is_conj() or tensor.is_neg():
        return None
    item, offset = tensor.itemsize, int(tensor.storage_offset())
    storage = tensor.untyped_storage()
    stride = tensor.stride()
    is_own = tensor.is_contiguous()
    if is_own:
        start, nbytes = offset * item, tensor.nbytes
        row_bytes = nbytes // tensor.shape[0] if marked else nbytes
    elif marked and _is_columns_of_whole(tensor, storage.nbytes()):
        start, nbytes = 0, storage.nbytes()
        row_bytes = stride[0] * item
    elif not marked and _is_dense(tensor):
        start, nbytes, row_bytes = offset * item, tensor.nbytes, tensor.nbytes
    else:
        return None
    return Region(
        row_bytes,
        Place(storage._cdata, start, nbytes),
        View(tensor.dtype, tensor.shape, stride, offset - start // item),
        _version_of(tensor),
        is_own,
    )


def content_of(region: Region, rows: Tensor | None, packed: torch.dtype) -> Content:
    """What is copied of a region: its first rows, handed over as values of ``packed``."""
    if rows is None:
        return Content(region.place, packed, None)
    return Content(region.place, packed, (region.row_bytes, rows.data_ptr(), _version_of(rows)))


def contiguous_stride(size: torch.Size) -> tuple[int, ...]:
    """The strides of a tensor whose rows lie one after another."""
    return tuple(math.prod(size[dim + 1 :]) for dim in range(len(size)))


def _version_of(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _is_columns_of_whole(tensor: Tensor, storage_bytes: int) -> bool:
    """Are these columns of a matrix that is its whole storage, each row within one of its rows?"""
    inner = sum((size - 1) * stride for size, stride in _dims(tensor)[1:])
    row = tensor.stride(0)
    return (
        row * tensor.shape[0] * tensor.itemsize == storage_bytes
        and int(tensor.storage_offset()) + inner < row
    )


def _is_dense(tensor: Tensor) -> bool:
    """Is every byte between the first and the last the tensor's own, once?"""
    dims = sorted(_dims(tensor), key=lambda dim: dim[1])
    expected = 1
    for size, stride in dims:
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _dims(tensor: Tensor) -> list[tuple[int, int]]:
    return list(zip(tensor.shape, tensor.stride(), strict=True))
