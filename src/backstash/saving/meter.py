"""How many bytes autograd saves for backward."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from backstash.errors import LayoutError
from backstash.tensors import QuantizedTensor


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

    def unpack(self, handle: Any) -> Tensor:
        """Never called: a meter accepts nothing."""
        raise LayoutError(f"a Meter keeps no tensors, got handle {handle!r}")


def _storages_of(tensor: Tensor) -> list[torch.UntypedStorage]:
    buffers = tensor.buffers.values() if isinstance(tensor, QuantizedTensor) else (tensor,)
    return [buffer.untyped_storage() for buffer in buffers]
