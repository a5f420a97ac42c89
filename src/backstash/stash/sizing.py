"""How large a pool should be: from an estimate at first, then from what was seen.

The pool follows a decayed maximum of the pages that each round would have needed: a burst is
remembered for a while and then forgotten, and one quiet round does not make it small.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from torch import Tensor

from backstash.errors import ConfigError
from backstash.kernels import PoolState
from backstash.nn.options import check_numbers, check_sizes
from backstash.stash.streams import Event, Streams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizing:
    """By how much a pool is larger than its need, and how fast it forgets.

    Attributes:
        margin: Capacity over need; more than 1.
        decay: What is left of a maximum after a round.
        most_bytes: The pool never grows beyond this; None for no limit.

    Raises:
        ConfigError: A value means nothing.
    """

    margin: float = 1.1
    decay: float = 0.98
    most_bytes: int | None = None

    def __post_init__(self) -> None:
        check_numbers(margin=self.margin, decay=self.decay, remedy="1.1 and 0.98 are usual")
        if not 1 <= self.margin < math.inf or not 0 <= self.decay <= 1:
            raise ConfigError(
                f"Sizing needs a margin of 1 or more and a decay between 0 and 1, got "
                f"margin={self.margin} and decay={self.decay}"
            )
        if self.most_bytes is not None:
            check_sizes(most_bytes=self.most_bytes, remedy="None for no limit")

    def follow(self, high: float, demand: float) -> float:
        """The decayed maximum after a round that needed ``demand`` pages."""
        return max(demand, high * self.decay)

    def pages(self, need: float, page_bytes: int) -> int:
        """Pages of a pool for a need of ``need`` pages."""
        return self.limit(math.ceil(need * self.margin), page_bytes)

    def limit(self, pages: int, page_bytes: int) -> int:
        """``pages``, or as many as there may be."""
        return pages if self.most_bytes is None else min(pages, self.most_bytes // page_bytes)


class Need:
    """What the rounds of a pool have needed, asked of the device and read when it has arrived.

    Args:
        pages: The need, by an estimate at first; a decayed maximum later.
        answer: Memory like the counters', of the host, that the device can write.
    """

    def __init__(self, pages: float, answer: Tensor) -> None:
        self.pages = pages
        self._kept = 0.0
        self._answer = answer
        self._asked: Event | None = None

    def note_kept(self, pages: float) -> None:
        """Count pages that would have been wanted too, had there been room for them."""
        self._kept += pages

    def after_round(self, sizing: Sizing, state: Tensor, streams: Streams) -> float | None:
        """The need by now; None while the answer about the last round is under way."""
        if self._asked is None:
            with streams.outward([streams.here()]):
                self._answer.copy_(state, non_blocking=True)
                state[PoolState.DEMAND].zero_()
                self._asked = streams.event()
        if not streams.has_passed(self._asked):
            return None
        self._asked = None
        demand, self._kept = int(self._answer[PoolState.DEMAND]) + self._kept, 0.0
        self.pages = sizing.follow(self.pages, demand)
        return self.pages


def pages_for(buffers: Iterable[tuple[int, int]], page_bytes: int) -> int:
    """Pages that buffers of ``(rows, bytes of a row)`` fill: each one's last page is its own."""
    return sum(-(-rows * row_bytes // page_bytes) for rows, row_bytes in buffers)
