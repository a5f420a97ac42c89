"""The buffers that one autograd node saves, kept together, and the handles to them.

Autograd holds a :class:`Saved` for each tensor; that holds the :class:`Kept` buffer, which
several tensors may be views of; that holds the :class:`Batch`.  So a batch lives as long as
anything can still ask for one of its buffers, and gives its pages back when it goes.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from backstash.errors import ConfigError, ModifiedError
from backstash.kernels import InPages, Moves, PagedRows
from backstash.stash.admission import Account
from backstash.stash.launch import Buffer, Launch
from backstash.stash.pool import PagePool
from backstash.stash.region import Region, View
from backstash.stash.streams import Event, Stream


class BatchState(enum.Enum):
    """Where the bytes of a batch are."""

    #: In the originals; nothing has been copied, nor need be if backward comes first.
    OPEN = "open"
    #: In the originals, and on their way into pages.
    COPYING = "copying"
    #: In pages alone.
    PAGED = "paged"


class Original(NamedTuple):
    """A saved tensor's buffer, and the tensor as it was packed, to see whether it changes."""

    buffer: Buffer
    tensor: Tensor
    version: int | None

    def is_changed(self) -> bool:
        return self.version is not None and self.tensor._version != self.version


@dataclasses.dataclass
class Restored:
    """Buffers that were copied back and not yet asked for."""

    by_slot: dict[int, Tensor]
    event: Event
    stream: Stream
    ahead: bool
    moves: Moves | None = None


class Tail(enum.Enum):
    """What lies behind the valid rows of a buffer that was copied back."""

    #: Anything, NaN too.  Right for whoever never reads past the valid rows, as our layers.
    UNSPECIFIED = "unspecified"
    #: Zeros, at the price of writing them: for plain PyTorch, which computes with every row.
    ZEROS = "zeros"


class Batch:
    """The buffers of one launch, and what became of them.

    Attributes:
        number: Which batch of its round it is.
        account: The pages reserved for it, None where nobody watches.
        originals: By slot; empty once the copies are done.
        packed: By slot, the dtype that its buffer was handed over in.
        shared: Slots that more than one node saved.
        changed: Was an original changed in place while it was copied?
        lands_at: When this many tensors have been offered, the originals are let go.
        is_claimed: Was it computed in its pages, so that nothing is ever copied ahead?
    """

    is_claimed = False

    def __init__(self, pool: PagePool, number: int, account: Account | None) -> None:
        self.pool = pool
        self.number = number
        self.account = account
        self.state = BatchState.OPEN
        self.originals: list[Original] = []
        self.nbytes: list[int] = []
        self.packed: list[torch.dtype] = []
        self.shared: set[int] = set()
        self.changed = False
        self.launch: Launch | None = None
        self.restored: Restored | None = None
        self.stream: Stream = None
        self.complete: Event = None
        self.captured = False
        self.lands_at = math.inf
        # The list of moves that the stream which computes has waited for.
        self._written: Event = None
        # Where its pages are read: given back, they must not be written before.
        self._readers: list[Stream] = []

    def add(
        self, region: Region, rows: Tensor | None, tensor: Tensor, packed: torch.dtype = torch.uint8
    ) -> Kept:
        """Take the bytes of ``tensor`` into the batch, before it is launched."""
        # Detached it has the same version and no graph: a node may save its own output.
        original = tensor.detach()
        data, width = region.bytes_of(original), region.place.nbytes
        if packed is not torch.uint8:
            data = data.view(packed)
        valid = self.pool.one_row
        if rows is not None:
            valid = rows if rows.ndim == 1 else rows.reshape(1)
            width = region.row_bytes
        buffer = Buffer(data, valid, width // packed.itemsize)
        self.originals.append(Original(buffer, original, region.version))
        self.nbytes.append(region.place.nbytes)
        self.packed.append(packed)
        return Kept(self, len(self.nbytes) - 1, StorageWeakRef(tensor.untyped_storage()), rows)

    @property
    def unshared(self) -> list[int]:
        """The slots that one node alone asks for: they are copied back together."""
        return [slot for slot in range(len(self.nbytes)) if slot not in self.shared]

    def is_exact(self, slot: int) -> bool:
        """Are its bytes those that were saved, and not compressed?"""
        return self.packed[slot] is torch.uint8

    def close(self, *, is_sent: bool) -> None:
        """All buffers are there, as soon as what has been launched so far is done.

        What is sent now is copied behind all that; else a mark is left for later.
        """
        streams = self.pool.streams
        self.stream, self.captured = streams.here(), streams.is_capturing()
        self.complete = None if is_sent else streams.event()

    def send(self, *, lands_at: float = math.inf, leaving: bool = False) -> None:
        """Copy the originals of a closed batch into pages, inside the pool's turn.

        With ``leaving`` whatever matmuls can move is left to them.
        """
        buffers = [original.buffer for original in self.originals]
        self.launch = self.pool.stash(
            buffers, self.account, self.number, after=self.complete, leaving=leaving
        )
        self.state = BatchState.COPYING
        self.lands_at = lands_at

    def moves(self, stream: Stream) -> Moves | None:
        """What matmuls that are launched on ``stream`` next may move of the batch, in or back."""
        launch, restored = self.launch, self.restored
        if launch is None:
            return None
        if restored is not None and restored.moves is not None:
            owner, moves, written = restored.stream, restored.moves, restored.event
        elif launch.moves is not None:
            owner, moves, written = self.stream, launch.moves, launch.done
        else:
            return None
        # On one stream matmuls are done before what they leave is finished; and a graph makes no
        # moves that came before it, nor leaves any to be made after it.
        if owner != stream or launch.captured != self.pool.streams.is_capturing():
            return None
        if self._written is not written:
            self.pool.streams.wait(written, stream)
            self._written = written
        return moves

    def finish(self) -> None:
        """Move what is left: the originals are in pages then, and what was copied back is there."""
        launch, restored = self.launch, self.restored
        if launch is not None and launch.moves is not None:
            after = None if self._written is launch.done else launch.done
            launch.done = self.pool.finish(launch, launch.moves, self.stream, after=after)
            launch.moves = None
        if launch is not None and restored is not None and restored.moves is not None:
            after = None if self._written is restored.event else restored.event
            restored.event = self.pool.finish(launch, restored.moves, restored.stream, after=after)
            restored.moves = None

    def land(self) -> None:
        """Let the originals go, behind their copies."""
        if self.state is not BatchState.COPYING or self.launch is None:
            return
        self.finish()
        self.pool.streams.wait(self.launch.done, self.stream)
        self.changed = any(original.is_changed() for original in self.originals)
        self.originals = []
        self.state = BatchState.PAGED

    def original(self, slot: int) -> Tensor | None:
        """The bytes of a slot if they have not been let go yet.

        Raises:
            ModifiedError: They were changed in place.
        """
        if self.changed or (self.originals and self.originals[slot].is_changed()):
            raise ModifiedError(
                "a tensor needed for backward was modified in place while it was being stashed; "
                "change a clone instead"
            )
        return self.originals[slot].buffer.data.view(torch.uint8) if self.originals else None

    def in_pages(self, slot: int, view: View) -> InPages | None:
        """Where a slot that was let go lies, if backward may read it there.

        That is on the device, in whole rows, as they were saved.  The pages stay as long as what
        is returned, and until the stream that computes here has done what was launched by then.
        """
        launch, is_whole = self.launch, view.is_all_of(self.nbytes[slot])
        if launch is None or not (is_whole and self.is_exact(slot) and launch.is_on_device):
            return None
        self.finish()
        streams = self.pool.streams
        if (here := streams.here()) not in self._readers:
            streams.wait(launch.done, here)
            self._readers.append(here)
        return PagedRows(
            launch.memory.device_pages,
            launch.memory.host_pages,
            launch.table,
            slot,
            launch.buffers,
            self.pool.page_bytes,
            view.dtype,
            view.size,
            holder=self,
        )

    def forget_copy(self, slot: int) -> None:
        """A slot that was copied back is read in its pages after all."""
        if self.restored is not None and slot in self.restored.by_slot:
            self.pool.streams.wait(self.restored.event, self.restored.stream)
            del self.restored.by_slot[slot]

    def copy_back(self, slots: Sequence[int], *, tail: Tail, ahead: bool) -> Restored:
        """New buffers with the bytes of some slots, inside the pool's turn.

        Raises:
            ConfigError: The batch has not been sent.
        """
        if self.launch is None:
            raise ConfigError("a batch that was never sent cannot be copied back; send it first")
        new = torch.empty if tail is Tail.UNSPECIFIED else torch.zeros
        by_slot = {
            slot: new(self.nbytes[slot], dtype=torch.uint8, device=self.pool.device)
            for slot in slots
        }
        operands = [by_slot[slot].view(self.packed[slot]) for slot in slots]
        event, moves = self.pool.restore(self.launch, operands, slots, leaving=ahead)
        return Restored(by_slot, event, self.pool.streams.here(), ahead, moves)

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        if self.launch is None:
            if self.account is not None:
                self.pool.drop(self.account)
            return
        streams = self.pool.streams
        if self.launch.captured == streams.is_capturing():
            self.finish()
            # Memory that a lane still uses must not be used again before.
            if self.originals:
                streams.wait(self.launch.done, self.stream)
            if self.restored is not None and self.restored.by_slot:
                streams.wait(self.restored.event, self.restored.stream)
        self.launch.reads += self._readers
        self.pool.drop(self.launch)


class Kept:
    """One buffer of a batch."""

    __slots__ = ("__weakref__", "batch", "rows", "slot", "storage")

    def __init__(
        self, batch: Batch, slot: int, storage: StorageWeakRef, rows: Tensor | None
    ) -> None:
        self.batch = batch
        self.slot = slot
        # It is known by two addresses, of its storage and of the number of its rows: while there
        # is a reference, weak or not, nothing else gets them.
        self.storage = storage
        self.rows = rows


class Saved(NamedTuple):
    """What autograd holds of a saved tensor: how it is a view of which buffer."""

    kept: Kept
    view: View
