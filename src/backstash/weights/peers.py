"""Shards that the other GPUs of a machine read by themselves.

Where GPUs reach each other's memory, a gather need not be a kernel that runs beside the
matmuls and takes multiprocessors from them: each rank copies the rows of the others with its
copy engines, straight to where they belong in the whole weight.

Such a copy is no collective, so nobody waits for anybody, and two things have to be seen to.
Nobody may read a shard before its owner has written it, and nobody may write his before the
others have read it.  Shards are written between a step and the next, so a *fence* at the
beginning of a forward pass and one at the end of each pass are enough: a fence is a collective
of one number, which no GPU gets past before all have come to it.

Only passes whose order is known (:mod:`backstash.weights.progress`) read in this way.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from backstash.weights.layout import Layout

# Rows begin where any copy engine and any dtype likes them to.
_ALIGN = 512


class PeerMemory:
    """The shards of all ranks of a group, in memory that each of them can read.

    Attributes:
        is_open: Whether all ranks are between two fences, so that shards hold still.
        token: What a fence sends.
        pulls: How many gathers were copied in this way.
    """

    def __init__(self, buffers: Sequence[Tensor], rank: int, keeper: Any) -> None:
        self.is_open = False
        self._buffers = list(buffers)
        self._mine = self._buffers[rank]
        self._rank = rank
        self._keeper = keeper  # of the mapping of the others' memory
        self._used = 0
        self._views: dict[Any, list[Tensor]] = {}
        self.pulls = 0
        self.token = torch.zeros((), device=self._mine.device)
        self._stream = torch.cuda.Stream(self._mine.device)

    @classmethod
    def reserve(
        cls, group: dist.ProcessGroup, device: torch.device, nbytes: int
    ) -> PeerMemory | None:
        """Memory for as many bytes on each rank; None where the ranks cannot share it.

        All ranks call it, with the same number.
        """
        if not _within_reach(group, device):
            return None
        import torch.distributed._symmetric_memory as symmetric

        mine = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(mine, group)
        rank = dist.get_rank(group)
        buffers = [
            mine if peer == rank else handle.get_buffer(peer, (nbytes,), torch.uint8)
            for peer in range(dist.get_world_size(group))
        ]
        return cls(buffers, rank, handle)

    @staticmethod
    def bytes_for(layout: Layout, itemsize: int) -> int:
        """What the shard of one weight takes on each rank, which is that of the longest one."""
        return -(-max(layout.counts) * layout.columns * itemsize // _ALIGN) * _ALIGN

    def place(self, shard: Tensor, layout: Layout) -> Tensor:
        """Copy a shard to where the others will read it; all ranks do, in the same order."""
        start, self._used = self._used, self._used + self.bytes_for(layout, shard.itemsize)
        placed = self._mine[start : start + shard.nbytes].view(shard.dtype).view(shard.shape)
        return placed.copy_(shard)

    def holds(self, rows: Sequence[Tensor]) -> bool:
        """Whether all these lie here, so at the same place of every rank, and hold still."""
        here = self._mine.untyped_storage().data_ptr()
        return self.is_open and all(x.untyped_storage().data_ptr() == here for x in rows)

    def pull(self, pairs: Sequence[tuple[Tensor, Tensor, tuple[int, ...]]]) -> torch.Event:
        """Copy the rows of all ranks, to wholes in which they follow each other.

        Args:
            pairs: Rows of this rank, the whole, and how many rows each rank has.

        Returns:
            What to wait for before the wholes are read.
        """
        self.pulls += 1
        now = torch.cuda.current_stream(self._mine.device)
        self._stream.wait_stream(now)  # the memory of a whole may still be read as another's
        size = len(self._buffers)
        with torch.cuda.stream(self._stream):
            for rows, whole, counts in pairs:
                shards = self._shards(rows, counts)
                # Each rank begins with its neighbour, so that not all read one.
                for turn in range(1, size + 1):
                    peer = (self._rank + turn) % size
                    first = sum(counts[:peer])
                    whole[first : first + counts[peer]].copy_(shards[peer])
            return self._stream.record_event()

    def _shards(self, rows: Tensor, counts: tuple[int, ...]) -> list[Tensor]:
        """The rows of each rank, of which these are one's own."""
        start = rows.storage_offset() * rows.itemsize
        place = (start, rows.dtype, rows.shape[1:], counts)
        if place not in self._views:
            width = rows.shape[1:].numel() * rows.itemsize
            self._views[place] = [
                buffer[start : start + count * width].view(rows.dtype).view(count, *rows.shape[1:])
                for buffer, count in zip(self._buffers, counts, strict=True)
            ]
        return self._views[place]


def _within_reach(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Do all ranks sit on this machine, each on a GPU that the others can read?"""
    mine = None
    if device.type == "cuda" and device.index is not None:
        mine = (socket.gethostname(), device.index)
    places: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(places, mine, group=group)
    hosts = {place and place[0] for place in places}
    indices = {place[1] for place in places if place is not None}
    if len(hosts) != 1 or None in hosts or len(indices) != len(places):
        return False
    count = torch.cuda.device_count()
    reaches = all(
        index < count and torch.cuda.can_device_access_peer(device, index)
        for index in indices - {device.index}
    )
    dist.all_gather_object(places, reaches, group=group)
    return all(places)
