"""What a sharded weight is doing, and what memory that takes.

::

    SHARDED -> GATHERING -> GATHERED -> SHARDED        forward, and again in backward
    SHARDED -> REDUCING -> SHARDED                     once its gradient is there

Each use of a weight is a transfer with a state of its own, because a weight that is used
twice can be read by one matmul while it is gathered for the next.  The weight is in the
state of the transfer that holds the most.
"""

from __future__ import annotations

import enum

from backstash.errors import BackstashError


class State(enum.Enum):
    """What is in memory, beside the optimizer's state; in the order of how much."""

    #: The shard, and its gradient if there is one.
    SHARDED = "sharded"
    #: The shard, the whole gradient that is being sent, and a gradient of the shard to come.
    REDUCING = "reducing"
    #: The shard, and memory for the whole weight that a collective is filling.
    GATHERING = "gathering"
    #: The shard, and the whole weight that a matmul is reading.
    GATHERED = "gathered"


def move(now: State, start: State, end: State, what: str) -> State:
    """The state after a transition from ``start`` to ``end``.

    Raises:
        BackstashError: The transfer is not in ``start``.
    """
    if now is not start:
        raise BackstashError(
            f"{what} can become {end.value} only while it is {start.value}, and it is "
            f"{now.value}; each transfer is finished once"
        )
    return end
