"""In which order weights are used, learnt from the last time.

The order is a hint, never a promise.  What comes next is guessed from the last pass; a use
that the guess did not expect is a *surprise*: it is counted, and the guess goes on from where
that use was last time, if it was there at all.
"""

from __future__ import annotations

from backstash.formats import Usage

#: Which bundle, and in which direction.
Use = tuple[int, Usage]


class Order:
    """The uses of one kind of pass (forward, or backward), as they were the last time.

    Attributes:
        surprises: Uses that were not the one expected, over all passes but the first.
    """

    def __init__(self) -> None:
        self.surprises = 0
        self._last: tuple[Use, ...] = ()
        self._now: list[Use] = []
        self._next = 0

    def saw(self, use: Use) -> None:
        """Take a use in, and move the guess behind it."""
        self._now.append(use)
        if not self._last:
            return
        try:
            position = self._last.index(use, self._next)
        except ValueError:
            self.surprises += 1
            return
        self.surprises += position != self._next
        self._next = position + 1

    def upcoming(self, count: int) -> tuple[Use, ...]:
        """The next ``count`` uses, as far as the last pass knows."""
        return self._last[self._next : self._next + count]

    def close(self) -> None:
        """The pass has ended: it is what the next one is guessed from."""
        if self._now:
            self._last = tuple(self._now)
        self.forget()

    def forget(self) -> None:
        """The pass has failed: nothing is learnt from it."""
        self._now.clear()
        self._next = 0
