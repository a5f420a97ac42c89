"""How batches come back: read where they are, copied when asked for, or copied ahead of that.

What a node can read in its pages is never copied: the node gets to know where they are, and they
are given back behind its last launch.  Anything else is copied into a buffer at full capacity.
Copies take time, so those that are expected next are made while the batch before them is
used: not of what was read in place the last time.

An original that is still there needs neither.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from backstash.kernels import InPages
from backstash.saving import Fits
from backstash.stash.batch import Batch, BatchState, Saved, Tail
from backstash.stash.departures import Departures
from backstash.stash.foresight import Foresight
from backstash.stash.pool import PagePool


class Returns:
    """What comes back of the batches of one stash.

    Args:
        pool: Theirs.
        departures: Those that still have originals.
        foresight: Which is expected next.
        tail: What lies behind the valid rows of a copy.
        ahead: How many batches are copied before they are asked for.

    Attributes:
        live: By number, the batches of which anybody holds a handle.
        counts: What has come back how.
    """

    def __init__(
        self,
        pool: PagePool,
        departures: Departures,
        foresight: Foresight,
        *,
        tail: Tail,
        ahead: int,
    ) -> None:
        self.live: weakref.WeakValueDictionary[int, Batch] = weakref.WeakValueDictionary()
        self.counts = dict.fromkeys(("foreseen", "surprises", "untouched", "in_place"), 0)
        self._pool = pool
        self._departures = departures
        self._foresight = foresight
        self._tail = tail
        self._ahead = ahead

    def unpack(self, handle: Saved, *, newest: int) -> Tensor:
        """The tensor again, ``newest`` being the number of the newest batch."""
        kept, view = handle
        batch, slot = kept.batch, kept.slot
        with self._pool.turn():
            is_next = self._asked(batch, slot, newest)
            buffer = batch.original(slot)
            if buffer is None:
                buffer = self._copied(batch, slot)
            else:
                self.counts["untouched"] += 1
            if is_next:
                self._look_ahead(batch.number)
        return view.of(buffer)

    def read(self, handle: Saved, fits: Fits, *, newest: int) -> Tensor | InPages:
        """The same, or the pages themselves if they fit the node that asks."""
        kept, view = handle
        batch, slot = kept.batch, kept.slot
        with self._pool.turn():
            is_next = self._asked(batch, slot, newest, is_read=True)
            buffer = batch.original(slot)
            if buffer is not None:
                self.counts["untouched"] += 1
                value = view.of(buffer)
            else:
                value = batch.in_pages(slot, view)
                if value is not None and fits(value):
                    batch.forget_copy(slot)
                    self._foresight.read_in_place(batch.number, slot)
                    self.counts["in_place"] += 1
                else:
                    value = view.of(self._copied(batch, slot))
            if is_next:
                self._look_ahead(batch.number)
        return value

    def _asked(self, batch: Batch, slot: int, newest: int, *, is_read: bool = False) -> bool:
        """A buffer is asked for: is its batch another than that of the last one?"""
        if batch.is_claimed:
            return False
        # Compressed values come from the pages even where the originals are still there, so that
        # what backward sees does not depend on when it asks.
        exact = batch.is_exact(slot)
        is_next = self._foresight.asked(batch.number, newest=newest, is_read=is_read)
        if is_next or not exact:
            self._departures.land(but=batch if exact else None)
        return is_next

    def _copied(self, batch: Batch, slot: int) -> Tensor:
        batch.finish()
        restored = batch.restored
        if restored is None or slot not in restored.by_slot:
            self._count_demand(batch)
            alone = slot in batch.shared
            slots = [slot] if alone else self._to_copy(batch, asked=slot)
            fresh = batch.copy_back(slots, tail=self._tail, ahead=False)
            if alone:
                # Others of the batch may be waiting to be asked for.
                self._pool.streams.wait(fresh.event, self._pool.streams.here())
                return fresh.by_slot[slot]
            batch.restored = restored = fresh
        elif restored.ahead:
            restored.ahead = False
            self.counts["foreseen"] += 1
        streams = self._pool.streams
        streams.wait(restored.event, streams.here())
        buffer = restored.by_slot.pop(slot)
        streams.lend(buffer, restored.stream)
        return buffer

    def _to_copy(self, batch: Batch, asked: int | None = None) -> Sequence[int]:
        """The slots that are copied together: those that one node alone wants as tensors."""
        in_place = self._foresight.in_place(batch.number)
        return [slot for slot in batch.unshared if slot == asked or slot not in in_place]

    def _count_demand(self, batch: Batch) -> None:
        others = list(self.live.values())
        if any(b.restored is not None and b.restored.ahead for b in others if b is not batch):
            self.counts["surprises"] += 1

    def _look_ahead(self, number: int) -> None:
        """Copy those back that are expected after ``number``, while its backward runs.

        What still waits and is not among them has to make room for them.
        """
        soon = [number]
        for _ in range(self._ahead):
            soon.append(self._foresight.after(soon[-1]))
        self._departures.send_all(but=soon)
        for number in soon[1:]:
            batch = self.live.get(number)
            if batch is not None and batch.state is BatchState.OPEN:
                continue
            if batch is None or batch.state is not BatchState.PAGED or batch.changed:
                return
            waits = batch.restored is not None and batch.restored.by_slot
            slots = self._to_copy(batch)
            if slots and not waits:
                batch.restored = batch.copy_back(slots, tail=self._tail, ahead=True)
                self._departures.carried = weakref.ref(batch)
