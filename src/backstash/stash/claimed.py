"""Batches whose buffers are computed in their pages, so that there is nothing to copy.

A node that can write what it saves into slabs (:mod:`backstash.kernels.reference.slabs`) asks for
places before it computes.  What it then saves are stand-ins, tensors without values, which the
stash knows by their storages.  Backward reads the slabs where they are; whoever else asks gets
the rows in a buffer of their own, as of any batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from backstash import kernels
from backstash.kernels import InPages, Slabs
from backstash.saving import Place
from backstash.stash.admission import Account
from backstash.stash.batch import Batch, BatchState, Kept, Restored, Saved, Tail
from backstash.stash.launch import Launch, Matrices
from backstash.stash.pool import PagePool
from backstash.stash.region import View, contiguous_stride


class ClaimedBatch(Batch):
    """The matrices of one node, each in slabs from the start."""

    is_claimed = True

    def __init__(
        self, pool: PagePool, number: int, account: Account | None, matrices: Matrices
    ) -> None:
        super().__init__(pool, number, account)
        self.close(is_sent=True)
        self._matrices = matrices
        self.launch, self._shift_G = _claim(pool, matrices, account, number)
        self.state = BatchState.PAGED
        item = matrices.dtype.itemsize
        self.nbytes = [matrices.rows * columns * item for columns in matrices.columns]
        self.packed = [torch.uint8] * len(self.nbytes)
        # None is copied ahead, nor because another one is.
        self.shared = set(range(len(self.nbytes)))

    def places(self) -> list[tuple[Place, Saved]]:
        """Where each matrix is to be computed, and the handle for what is saved instead."""
        found = []
        for slot, columns in enumerate(self._matrices.columns):
            size = torch.Size((self._matrices.rows, columns))
            stand_in = torch.empty(size, dtype=self._matrices.dtype, device="meta")
            view = View(self._matrices.dtype, size, contiguous_stride(size), 0)
            kept = Kept(self, slot, StorageWeakRef(stand_in.untyped_storage()), None)
            found.append((Place(self._slabs(slot), stand_in), Saved(kept, view)))
        return found

    def in_pages(self, slot: int, view: View) -> InPages | None:
        """The slabs, for a node that may read them there."""
        self._wait_here()
        return self._slabs(slot)._replace(holder=self)

    def copy_back(self, slots: Sequence[int], *, tail: Tail, ahead: bool) -> Restored:
        """New buffers with the rows of some slots; what is behind them are zeros."""
        self._wait_here()
        streams = self.pool.streams
        by_slot = {
            slot: kernels.slab_values(self._slabs(slot)).view(-1).view(torch.uint8)
            for slot in slots
        }
        return Restored(by_slot, streams.event(), streams.here(), ahead)

    def _slabs(self, slot: int) -> Slabs:
        assert self.launch is not None, "it is made with its launch"
        matrices, page_bytes = self._matrices, self.pool.page_bytes
        widths = matrices.widths(page_bytes)
        return Slabs(
            self.launch.memory.device_pages,
            self.launch.table,
            matrices.ends_G,
            self._shift_G,
            kernels.table_length(self.launch.buffers, sum(widths[:slot])),
            sum(widths),
            page_bytes,
            matrices.dtype,
            torch.Size((matrices.rows, matrices.columns[slot])),
        )

    def _wait_here(self) -> None:
        """Go on behind what was computed; the pages stay until what is launched here is done."""
        streams = self.pool.streams
        if (here := streams.here()) not in self._readers:
            streams.wait(self.stream, here)
            self._readers.append(here)

    def __del__(self) -> None:
        # Where it was abandoned it may still be written.
        if self.launch is not None and self.stream not in self._readers:
            self._readers.append(self.stream)
        super().__del__()


def _claim(
    pool: PagePool, matrices: Matrices, account: Account | None, number: int
) -> tuple[Launch, Tensor]:
    """Take the pages, inside the pool's turn; what computes here goes on behind that.

    Returns:
        The launch, and ``shift_G`` of :func:`~backstash.kernels.claim_slabs`.
    """
    memory, captured = pool.begin()
    streams, groups, buffers = pool.streams, len(matrices.ends_G), len(matrices.columns)
    length = kernels.table_length(buffers, matrices.pages(pool.page_bytes))
    # Kernels take both at whole units of memory.
    length += length % 2
    with streams.outward([streams.here()]):
        # One piece of memory, as long as the pages are not given back.
        whole = torch.empty(length + groups, dtype=torch.int64, device=pool.device)
        table, shift_G = whole[:length], whole[length:].view(torch.int32)[:groups]
        kernels.claim_slabs(
            matrices.ends_G,
            matrices.rows,
            matrices.columns,
            matrices.dtype,
            table,
            shift_G,
            memory.device_pages,
            memory.free_N,
            memory.state,
            memory.ledger.receipt_of(account),
            page_bytes=pool.page_bytes,
            number=number,
        )
        done = streams.event()
    streams.wait(done, streams.here())
    if account is not None:
        memory.ledger.launched(account, done)
    launch = Launch(
        table=table, buffers=buffers, account=account, done=done, captured=captured, memory=memory
    )
    return launch, shift_G
