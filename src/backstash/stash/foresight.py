"""Which batch will be asked for next: a guess from the last round, and nothing but a guess.

A *round* goes from one moment at which nothing is stashed to the next: a step, usually, with
all of its microbatches.  Within it batches are numbered in the order in which they came.  What
followed what in the last round is expected to follow it again; before there was one, the last
in is expected first out.
"""

from __future__ import annotations


class Foresight:
    """The order of the last round, and that of this one so far."""

    def __init__(self) -> None:
        self._expected: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self._last: int | None = None

    def new_round(self) -> None:
        """Nothing is stashed any more: what was seen becomes what is expected."""
        if self._seen:
            self._expected, self._seen = self._seen, {}
        self._last = None

    def asked(self, number: int) -> bool:
        """A batch was asked for; is it another than the last time?"""
        if number == self._last:
            return False
        if self._last is not None:
            self._seen[self._last] = number
        self._last = number
        return True

    def after(self, number: int) -> int:
        """The number that is expected after ``number``."""
        return self._expected.get(number, number - 1)
