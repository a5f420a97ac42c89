"""What nobody holds any more and has not been given back: a few launches are given back at once.

Handles go one by one, in backward one batch a layer, by whatever thread.  To give the pages of
each back at once would be a launch for each; nobody needs them before pages are taken again.  A
CUDA graph gives back what it took itself, and nothing else: so what was recorded goes at once,
while it is recorded, and what was not waits until the recording is over.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable

from backstash.kernels import MOST_RELEASED
from backstash.stash.admission import Account
from backstash.stash.launch import Launch

Holding = Launch | Account


class Dropped:
    """Launches, and reservations of what was never stashed, in the order in which they went.

    Any thread may add one at any time, a finalizer too.
    """

    def __init__(self) -> None:
        self._held: collections.deque[Holding] = collections.deque()
        # May one of a graph be among them?  Seldom, so they are looked through only then.
        self._is_recorded = False

    def __len__(self) -> int:
        return len(self._held)

    def add(self, held: Holding) -> None:
        """Nobody holds this any more."""
        self._held.append(held)
        if _is_captured(held):
            self._is_recorded = True

    def is_due(self) -> bool:
        """Is it time to give them back?"""
        return self._is_recorded or len(self._held) >= MOST_RELEASED

    def has_some(self, *, capturing: bool) -> bool:
        """Is there one to be given back from here, where a graph is recorded or not?"""
        return any(_is_captured(held) == capturing for held in tuple(self._held))

    def take(self, *, capturing: bool) -> list[Holding]:
        """All that can be given back from here; they are somebody else's affair now."""
        taken: list[Holding] = []
        self._is_recorded = False
        for _ in range(len(self._held)):
            held = self._held.popleft()
            if _is_captured(held) == capturing:
                taken.append(held)
            else:
                self.add(held)
        return taken

    def forget_captured(self) -> None:
        """A graph that will never run has taken nothing."""
        self.take(capturing=True)


class Turn(contextlib.AbstractContextManager[None]):
    """One use of a pool alone, after which what was dropped meanwhile is given back, if it is due.

    A class, because a layer has many and a generator is slow.
    """

    __slots__ = ("_dropped", "_give_back", "_lock")

    def __init__(
        self, lock: threading.Lock, dropped: Dropped, give_back: Callable[[], None]
    ) -> None:
        self._lock = lock
        self._dropped = dropped
        self._give_back = give_back

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()
        if self._dropped.is_due():
            self._give_back()


def _is_captured(held: Holding) -> bool:
    return isinstance(held, Launch) and held.captured
