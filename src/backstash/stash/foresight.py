"""Which batch will be asked for next: a guess from the last round, and nothing but a guess.

A *round* goes from one moment at which nothing is stashed to the next: a step, usually, with
all of its microbatches.  Within it batches are numbered in the order in which they came.  What
followed what in the last round is expected to follow it again; before there was one, the last
in is expected first out.
"""

from __future__ import annotations


class Foresight:
    """The order of the last round, and that of this one so far.

    Args:
        ahead: A batch *stays* that is asked for while at most so many newer ones are there.
    """

    def __init__(self, ahead: int = 1) -> None:
        self._expected: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self._last: int | None = None
        self._ahead = ahead
        self._stays: set[int] = set()
        self._staying: set[int] = set()

    @property
    def has_seen_a_round(self) -> bool:
        """Is the order in which batches are asked for more than a guess?"""
        return bool(self._expected)

    def new_round(self) -> None:
        """Nothing is stashed any more: what was seen becomes what is expected."""
        if self._seen:
            self._expected, self._seen = self._seen, {}
            self._stays, self._staying = self._staying, set()
        self._last = None

    def asked(self, number: int, *, newest: int) -> bool:
        """A batch was asked for, the newest being ``newest``; is it another than the last time?"""
        if number == self._last:
            return False
        if newest - number <= self._ahead:
            self._staying.add(number)
        if self._last is not None:
            self._seen[self._last] = number
        self._last = number
        return True

    def stays(self, number: int) -> bool:
        """Did this batch stay in the last round?"""
        return number in self._stays

    def after(self, number: int) -> int:
        """The number that is expected after ``number``."""
        return self._expected.get(number, number - 1)
