"""In which order the collectives of a pass come, known from the last time, and in which convoys.

The first pass is agreed on, one collective after the other.  All ranks took part in it, so
all know its *order*: every gather and every reduction, as they came.  In the next pass of the
same kind nobody asks any more: each rank goes through the order by itself, and since all do,
no collective waits for a rank that does something else.  A rank that leaves a layer out still
joins its collectives, in their turn; what is not in the order waits until it is done with.

What lies near each other in the order moves together, in a *convoy*: one collective instead
of several small ones.  And what will be gathered next starts before it is asked for, a fixed
number of convoys ahead of each use.  Both follow from the order alone, so all ranks start
the same convoys one after the other, whenever each of them comes to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence

from backstash.weights.agreement import Kind, Wish

#: What a use moves: how many bytes, and what those that move together must have in common.
Weigh = Callable[[Wish], tuple[int, Hashable]]


@dataclasses.dataclass(frozen=True)
class Order:
    """The uses of a pass, and when the convoys that serve them start.

    Attributes:
        uses: Every gather and reduction, in the order in which they were asked for.
        convoys: Positions in ``uses`` that move together, in the order in which they start.
        first: How many convoys start when the pass begins.
        ready: For each use, how many must have started before it is served.
        ahead: For each use, how many have started when it is served.
    """

    uses: tuple[Wish, ...]
    convoys: tuple[tuple[int, ...], ...]
    first: int
    ready: tuple[int, ...]
    ahead: tuple[int, ...]

    @classmethod
    def of(cls, uses: Sequence[Wish], prefetch: int, together_bytes: int, weigh: Weigh) -> Order:
        """Plan the convoys of a pass, by going through it once.

        Args:
            uses: Of the last pass.
            prefetch: How many convoys of gathers run ahead of the one in use.
            together_bytes: The most that a convoy of several carries.
            weigh: What each use moves.
        """
        gathers = [i for i, use in enumerate(uses) if use.kind is not Kind.REDUCE]
        reductions = [i for i, use in enumerate(uses) if use.kind is Kind.REDUCE]
        loads = [weigh(use) for use in uses]
        coming = _in_convoys(gathers, loads, together_bytes)
        leaving = {convoy[-1]: convoy for convoy in _in_convoys(reductions, loads, together_bytes)}
        number = {i: place for place, convoy in enumerate(coming) for i in convoy}
        convoys: list[tuple[int, ...]] = []
        ready, ahead = [], []
        started = 0

        def start(until: int) -> None:
            nonlocal started
            convoys.extend(coming[started:until])
            started = max(started, until)

        start(prefetch)
        first = len(convoys)
        for i in range(len(uses)):
            if i in number:
                start(number[i] + 1)
                ready.append(len(convoys))
                start(number[i] + 1 + prefetch)
            else:
                convoys.extend([leaving[i]] if i in leaving else [])
                ready.append(len(convoys))
            ahead.append(len(convoys))
        return cls(tuple(uses), tuple(convoys), first, tuple(ready), tuple(ahead))


def _in_convoys(
    indices: Sequence[int], loads: Sequence[tuple[int, Hashable]], most_bytes: int
) -> list[tuple[int, ...]]:
    """Runs of uses that are alike and small enough together; a larger one goes alone."""
    convoys: list[list[int]] = []
    total, kind = 0, None
    for i in indices:
        size, alike = loads[i]
        if convoys and alike == kind and total + size <= most_bytes:
            convoys[-1].append(i)
            total += size
        else:
            convoys.append([i])
            total, kind = size, alike
    return [tuple(convoy) for convoy in convoys]
