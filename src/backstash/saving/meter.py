"""How many bytes autograd saves for backward."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from backstash.errors import LayoutError


class Meter:
    """Counts what autograd saves inside ``saving(meter)`` and keeps nothing.

    ``bytes`` counts each storage once, at its full size: that is what stays allocated.
    ``calls`` counts the tensors, those that share a storage too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Start from zero."""
        self.bytes = 0
        self.calls = 0
        # A weak reference keeps the address from being used again, so a key means one storage.
        self._seen: dict[int, StorageWeakRef] = {}

    def pack(self, tensor: Tensor, rows: Tensor | None) -> None:
        """Count ``tensor``; it is declined, so the next handler is asked."""
        with self._lock:
            self.calls += 1
            for buffer in _storages_of(tensor):
                reference = StorageWeakRef(buffer)
                if reference.cdata not in self._seen:
                    self._seen[reference.cdata] = reference
                    self.bytes += buffer.nbytes()

    def claim(self, like: Tensor, columns: Any, rows: int, ends_G: Tensor) -> None:
        """Nothing is computed here; what stands for what is elsewhere has its bytes."""

    def unpack(self, handle: Any) -> Tensor:
        """Never called: a meter accepts nothing."""
        raise LayoutError(f"a Meter keeps no tensors, got handle {handle!r}")


def _storages_of(tensor: Tensor) -> list[torch.UntypedStorage]:
    """Every storage that the tensor keeps allocated, those of a wrapper's buffers too."""
    if type(tensor) is not Tensor and is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]
        return [s for part in inner if isinstance(part, Tensor) for s in _storages_of(part)]
    return [buffer.untyped_storage() for buffer in _PARTS.get(tensor.layout, _itself)(tensor)]


def _itself(tensor: Tensor) -> tuple[Tensor, ...]:
    return (tensor,)


_PARTS: dict[torch.layout, Callable[[Tensor], tuple[Tensor, ...]]] = {
    torch.sparse_coo: lambda t: (t._indices(), t._values()),
    torch.sparse_csr: lambda t: (t.crow_indices(), t.col_indices(), t.values()),
    torch.sparse_bsr: lambda t: (t.crow_indices(), t.col_indices(), t.values()),
    torch.sparse_csc: lambda t: (t.ccol_indices(), t.row_indices(), t.values()),
    torch.sparse_bsc: lambda t: (t.ccol_indices(), t.row_indices(), t.values()),
}
