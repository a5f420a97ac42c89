"""The order of the collectives of a pass, known from the last pass, and their buckets.

The first pass is agreed on, one collective after the other.  All ranks took part in it, so
all know its *order*: every gather and every reduction, as they came.  In the next pass of the
same kind nobody asks any more: each rank goes through the order by itself, and since all do,
no collective waits for a rank that does something else.  A rank that leaves a layer out still
joins its collectives, in their turn; what is not in the order waits until it is done with.

What is near each other in the order moves together, in a *bucket*: one collective instead of
several small ones.  And what will be gathered next starts before it is asked for, a fixed
number of buckets ahead of each use.  Both follow from the order alone, so all ranks start
the same buckets one after the other, whenever each of them comes to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence

from backstash.weights.agreement import Kind, Request

#: What a use moves: how many bytes, and what those that move together must have in common.
Weigh = Callable[[Request], tuple[int, Hashable]]


@dataclasses.dataclass(frozen=True)
class Order:
    """The uses of a pass, and when the buckets that serve them start.

    Attributes:
        uses: Every gather and reduction, in the order in which they were asked for.
        buckets: Positions in ``uses`` that move together, in the order in which they start.
        first: How many buckets start when the pass begins.
        ready: For each use, how many must have started before it is served.
        ahead: For each use, how many have started when it is served.
    """

    uses: tuple[Request, ...]
    buckets: tuple[tuple[int, ...], ...]
    first: int
    ready: tuple[int, ...]
    ahead: tuple[int, ...]

    @classmethod
    def of(cls, uses: Sequence[Request], prefetch: int, together_bytes: int, weigh: Weigh) -> Order:
        """Plan the buckets of a pass, by going through it once.

        Args:
            uses: Of the last pass.
            prefetch: How many buckets of gathers run ahead of the one in use.
            together_bytes: The most that a bucket of several carries.
            weigh: What each use moves.
        """
        gathers = [i for i, use in enumerate(uses) if use.kind is not Kind.REDUCE]
        reductions = [i for i, use in enumerate(uses) if use.kind is Kind.REDUCE]
        loads = [weigh(use) for use in uses]
        coming = _in_buckets(gathers, loads, together_bytes)
        leaving = {bucket[-1]: bucket for bucket in _in_buckets(reductions, loads, together_bytes)}
        number = {i: place for place, bucket in enumerate(coming) for i in bucket}
        buckets: list[tuple[int, ...]] = []
        ready, ahead = [], []
        started = 0

        def start(until: int) -> None:
            nonlocal started
            buckets.extend(coming[started:until])
            started = max(started, until)

        start(prefetch)
        first = len(buckets)
        for i in range(len(uses)):
            if i in number:
                start(number[i] + 1)
                ready.append(len(buckets))
                start(number[i] + 1 + prefetch)
            else:
                buckets.extend([leaving[i]] if i in leaving else [])
                ready.append(len(buckets))
            ahead.append(len(buckets))
        return cls(tuple(uses), tuple(buckets), first, tuple(ready), tuple(ahead))


def _in_buckets(
    indices: Sequence[int], loads: Sequence[tuple[int, Hashable]], most_bytes: int
) -> list[tuple[int, ...]]:
    """Runs of uses that are alike and small enough together; a larger one goes alone."""
    buckets: list[list[int]] = []
    total, kind = 0, None
    for i in indices:
        size, alike = loads[i]
        if buckets and alike == kind and total + size <= most_bytes:
            buckets[-1].append(i)
            total += size
        else:
            buckets.append([i])
            total, kind = size, alike
    return [tuple(bucket) for bucket in buckets]
