"""Memory that is lent for one use: full weights and full gradients.

A lease is fresh memory, and its readers are counted by the storage itself: every view, every
tensor that autograd saved and every collective that still writes holds it.  With the last of
them it goes back to torch's caching allocator, at once.  There is no second pool here that
could hand the same bytes out while somebody reads them, and nothing to give back that could
be forgotten; what is here counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class Leases:
    """Lends memory and knows how much of it is out.

    Attributes:
        peak_bytes: The most that was out at once, since the last :meth:`reset_peak`.
    """

    def __init__(self) -> None:
        self._out: list[tuple[StorageWeakRef, int]] = []
        self._most = 0
        self.peak_bytes = 0

    def lend(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Fresh memory, out until the last tensor that shares it is gone."""
        tensor = torch.empty(*shape, dtype=dtype, device=device)
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        self._out.append((StorageWeakRef(storage), size))
        # What is out is looked through only where it could be a new peak: each look asks them all.
        self._most += size
        if self._most > self.peak_bytes:
            self.peak_bytes = max(self.peak_bytes, self.bytes)
        return tensor

    @property
    def bytes(self) -> int:
        """Bytes that are out now."""
        self._out = [(storage, size) for storage, size in self._out if not storage.expired()]
        self._most = sum(size for _, size in self._out)
        return self._most

    def reset_peak(self) -> None:
        """Start to measure the peak anew, from what is out now."""
        self.peak_bytes = self.bytes
