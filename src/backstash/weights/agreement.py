"""What all ranks do next, when each of them wants something else.

A collective hangs unless every rank joins it.  But a rank may skip a layer, use weights in
another order, have nothing to reduce, or be on its way out with an exception.  As long as the
ranks do what they did in the last pass, its order says what comes next
(:mod:`backstash.weights.order`), and only the end of a pass is agreed on.

In the first pass, and where a rank wants what is not in the order, the ranks agree before each
collective, on the host.  Each sends its request as a number, and all carry out the request with
the *smallest* number.  The rank that made it is served; the others take part with their shard (or
with zeros for a gradient) and send their own request again.  Each round serves at least one rank,
so all get on, and a rank that skips a layer serves the others that do not.

Requests come in the order of a step: forward before backward, weights in the order of the model
(the reverse in backward), the end of a pass last.  A rank that requests the end of a pass
therefore waits there and serves all that are not so far.

Two messages cannot be served.  A rank that fails says so with a number less than all others,
and everybody raises.  And the end of a pass that others will not come to (they are in another
pass) means that the ranks do not run the same program: everybody raises then, too.  In passes of
a known order that shows only at the end of one, or as collectives that do not fit together: those
fail, at the latest with the timeout of the process group.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any

from backstash.errors import PeerError
from backstash.formats import Usage
from backstash.weights.channel import Channel

_SPAN = 1 << 32


class Pass(enum.IntEnum):
    """Which half of a step."""

    FORWARD = 0
    BACKWARD = 1


class Kind(enum.IntEnum):
    """What is requested; gathers come first, so that a rank can get on."""

    GATHER_ROWS = 0
    GATHER_COLUMNS = 1
    REDUCE = 2
    END = 3


@dataclasses.dataclass(frozen=True)
class Request:
    """One thing that a rank wants done: with which bundle of weights, in which pass.

    Attributes:
        is_changed: Of the end of a pass: whether it was not gone through as the last one.
    """

    kind: Kind
    during: Pass
    bundle: int = 0
    is_changed: bool = dataclasses.field(default=False, compare=False, kw_only=True)

    @staticmethod
    @functools.lru_cache(maxsize=65536)
    def of(kind: Kind, during: Pass, bundle: int) -> Request:
        """The one request of its kind: found faster than made, and found again by identity."""
        return Request(kind, during, bundle)

    @property
    def code(self) -> int:
        """A number that is less the sooner it is due."""
        if self.kind is Kind.END:
            due = _SPAN - 1
        else:
            due = self.bundle if self.during is Pass.FORWARD else _SPAN - 2 - self.bundle
        return ((self.during * _SPAN + due) * len(Kind) + self.kind) * 2 + self.is_changed

    @classmethod
    def from_code(cls, code: int) -> Request:
        """The request that has this number."""
        code, is_changed = divmod(code, 2)
        (during, due), kind = divmod(code // len(Kind), _SPAN), Kind(code % len(Kind))
        if kind is Kind.END:
            return cls(kind, Pass(during), is_changed=bool(is_changed))
        return cls(kind, Pass(during), due if during == Pass.FORWARD else _SPAN - 2 - due)

    @property
    def usage(self) -> Usage:
        """The direction that a gather is for."""
        return Usage.ROWWISE if self.kind is Kind.GATHER_ROWS else Usage.COLUMNWISE


class Agreement:
    """Settles what the ranks of a channel do next."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._said: tuple[Any, Any] | None = None

    def settle(self, request: Request) -> Request:
        """What all ranks do now: this request, or one that is due before it.

        The end of a pass is changed if it is on any rank.

        Raises:
            PeerError: Another rank failed, is gone, or runs another program.
        """
        if self._channel.size == 1:
            return request
        if self._said is not None:
            # The others have heard it by now, or will before they hear anything else.
            said, self._said = self._said, None
            self._channel.wait_for(*said)
        least, most = self._channel.agree(request.code)
        if least < 0:
            raise PeerError(
                f"rank {-least - 1} of this group raised an exception and left the step; this "
                "rank stops as well, so that none waits for it"
            )
        now, last = Request.from_code(least), Request.from_code(most)
        if now.kind is not Kind.END:
            return now
        if now != last:
            raise PeerError(
                f"a rank of this group has ended its {now.during.name.lower()} pass, and another "
                f"is elsewhere ({last}); every rank must run as many forward and backward passes, "
                "or call join() in place of a backward pass"
            )
        return last

    def announce_failure(self) -> None:
        """Tell the others that this rank has raised; does not wait for them."""
        if self._channel.size > 1 and self._said is None:
            self._said = self._channel.post(-1 - self._channel.rank)
