"""When batches leave their originals: at once, beside the next matmuls, or never.

A copy costs least beside a matmul, which computes more than it reads and writes.  So what a
layer saves that multiplies is *left*: written down as moves, which the matmuls of the next layer
make.  They have until that layer in turn has saved a batch: then the originals *land*, they are
let go.  What backward asked for in the last round while at most a few newer batches were there,
*waits* where it is: it would hardly be copied before it is copied back.

What is copied at once lands when a few more tensors have been offered.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable

from backstash.stash.batch import Batch, BatchState
from backstash.stash.pool import PagePool

# Time for a copy to run beside compute, and less than a layer.
_OFFERS_UNTIL_LANDING = 2


def _nothing() -> None:
    """No batch."""


class Departures:
    """The batches of one stash that still have originals, oldest first.

    Args:
        pool: Theirs.
        ahead: How many batches are copied back ahead of their use; a batch waits no longer
            than until more newer ones than that have come.

    Attributes:
        offers: How many tensors the stash has been offered.
        next_landing: At how many of them something may have to land.
        sent: How many batches have been copied.
        carried: The batch that matmuls move now, in or back.
    """

    def __init__(self, pool: PagePool, ahead: int) -> None:
        self.offers = 0
        self.next_landing = math.inf
        self.sent = 0
        self.carried: Callable[[], Batch | None] = _nothing
        self._pool = pool
        self._ahead = ahead
        self._waiting: list[weakref.ref[Batch]] = []
        self._copying: list[weakref.ref[Batch]] = []

    @property
    def are_waiting(self) -> bool:
        """May a batch be waiting?"""
        return bool(self._waiting)

    def wait(self, batch: Batch) -> None:
        """Leave a complete batch where it is for now."""
        self._come(batch)
        batch.close(is_sent=False)
        self._waiting.append(weakref.ref(batch))

    def leave(self, batch: Batch) -> None:
        """Let the next matmuls move a complete batch."""
        self._come(batch)
        batch.close(is_sent=True)
        self._send(batch, leaving=True)

    def send(self, batch: Batch) -> None:
        """Copy a complete batch at once."""
        batch.close(is_sent=True)
        self._send(batch, lands_at=self.offers + _OFFERS_UNTIL_LANDING)

    def send_all(self, *, but: Collection[int] = ()) -> None:
        """Copy at once what waits and has no number of ``but``."""
        if not self._waiting:
            return
        self._send_some([batch for batch in self._open() if batch.number not in but])

    def land(self, *, by: float = math.inf, but: Batch | None = None) -> None:
        """Let originals go that land when ``by`` tensors have been offered, except for ``but``."""
        if not self._copying:
            return
        capturing = self._pool.streams.is_capturing()
        still: list[Batch] = []
        for reference in self._copying:
            batch = reference()
            if batch is None:
                continue
            if batch.lands_at <= by and batch.captured == capturing and batch is not but:
                batch.land()
            else:
                still.append(batch)
        self._copying = [weakref.ref(batch) for batch in still]
        landings = [batch.lands_at for batch in still]
        self.next_landing = max(min(landings, default=math.inf), self.offers + 1)

    def _come(self, newest: Batch) -> None:
        """What the layer of the newest batch has moved lands; what waited too long is copied."""
        self.land()
        self._send_some([b for b in self._open() if newest.number - b.number > self._ahead])

    def _open(self) -> list[Batch]:
        batches = [batch for reference in self._waiting if (batch := reference()) is not None]
        return [batch for batch in batches if batch.state is BatchState.OPEN]

    def _send_some(self, batches: Iterable[Batch]) -> None:
        capturing = self.are_waiting and self._pool.streams.is_capturing()
        for batch in batches:
            # A graph copies nothing that came before it, and leaves no copy to come after it.
            if batch.captured == capturing:
                self._send(batch)
        self._waiting = [weakref.ref(batch) for batch in self._open()]

    def _send(self, batch: Batch, *, lands_at: float = math.inf, leaving: bool = False) -> None:
        batch.send(lands_at=lands_at, leaving=leaving)
        self.sent += 1
        self._copying.append(weakref.ref(batch))
        self.next_landing = min(self.next_landing, lands_at)
        if leaving:
            self.carried = weakref.ref(batch)
