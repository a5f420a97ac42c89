"""What a node has told a stash of what it is about to save: hooks see one tensor at a time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from backstash.stash.batch import Batch, Saved
from backstash.stash.region import Content, Region


class Announced(NamedTuple):
    """What a node is about to save, and the batch that it will be of; None where it is refused."""

    rows: Tensor | None
    region: Region
    content: Content
    batch: Batch | None


class Expected(threading.local):
    """What a node on this thread has announced and not yet saved, and whether it multiplied."""

    def __init__(self) -> None:
        self.announced: list[Announced] = []
        self.multiplied = False
        # By the storage of what stands for each: matrices that the node computes in pages.
        self.claimed: dict[int, tuple[Tensor, Saved]] = {}

    def saves_claimed(self, tensors: Sequence[Tensor]) -> bool:
        """Are these what a node saves that has computed in pages?  If not, it never saved it."""
        claimed = self.claimed
        if claimed and not any(t.untyped_storage()._cdata in claimed for t in tensors):
            claimed.clear()
        return bool(claimed)

    def find(self, tensor: Tensor, rows: Tensor | None) -> Announced | None:
        """The announcement of just this tensor: nothing need be found out again then."""
        for one in self.announced:
            if one.rows is rows and one.region.is_of(tensor):
                return one
        return None

    def pop(self, content: Content) -> Announced | None:
        """The announcement of these bytes; it is not waited for any more, unless it is refused."""
        for i, one in enumerate(self.announced):
            if one.content == content:
                return one if one.batch is None else self.announced.pop(i)
        return None

    def is_waiting(self, batch: Batch) -> bool:
        """Will more be saved of this batch?"""
        return any(one.batch is batch for one in self.announced)
