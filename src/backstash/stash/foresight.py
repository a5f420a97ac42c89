"""Which batch will be asked for next: a guess from the last round, and nothing but a guess.

A *round* goes from one moment at which nothing is stashed to the next: a step, usually, with
all of its microbatches.  Within it batches are numbered in the order in which they came.  What
followed what in the last round is expected to follow it again; before there was one, the last
in is expected first out.  And what was read in its pages is expected to be read there again.
"""

from __future__ import annotations

from collections.abc import Collection


class Foresight:
    """The order of the last round, and that of this one so far.

    Args:
        ahead: A batch *stays* that is asked for while at most so many newer ones are there; where
            it is read in place, nothing is gained by that unless it is the newest.
    """

    def __init__(self, ahead: int = 1) -> None:
        self._expected: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self._last: int | None = None
        self._ahead = ahead
        self._stays: set[int] = set()
        self._staying: set[int] = set()
        self._in_place: dict[int, set[int]] = {}
        self._read: dict[int, set[int]] = {}

    @property
    def has_seen_a_round(self) -> bool:
        """Is the order in which batches are asked for more than a guess?"""
        return bool(self._expected)

    def new_round(self) -> None:
        """Nothing is stashed any more: what was seen becomes what is expected."""
        if self._seen:
            self._expected, self._seen = self._seen, {}
            self._stays, self._staying = self._staying, set()
            self._in_place, self._read = self._read, {}
        self._last = None

    def asked(self, number: int, *, newest: int, is_read: bool = False) -> bool:
        """A batch was asked for, the newest being ``newest``; is it another than the last time?

        ``is_read`` says that who asks would read it in its pages.
        """
        if number == self._last:
            return False
        if newest - number <= (0 if is_read else self._ahead):
            self._staying.add(number)
        if self._last is not None:
            self._seen[self._last] = number
        self._last = number
        return True

    def read_in_place(self, number: int, slot: int) -> None:
        """A slot of a batch was read in its pages."""
        self._read.setdefault(number, set()).add(slot)

    def in_place(self, number: int) -> Collection[int]:
        """The slots of this batch that are expected to be read so."""
        return self._in_place.get(number, ()) if self._expected else self._read.get(number, ())

    def stays(self, number: int) -> bool:
        """Did this batch stay in the last round?"""
        return number in self._stays

    def after(self, number: int) -> int:
        """The number that is expected after ``number``."""
        return self._expected.get(number, number - 1)
