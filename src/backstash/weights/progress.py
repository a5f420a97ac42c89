"""How far a pass has come in its order.

A rank asks for weights and gives gradients as its program goes; here that is held against the
order of the pass, and the buckets start that are due by then.  What the rank passes over is
joined for the sake of the others: a gather is let go, a reduction gets zeros.

Whether such zeros were all there was is not known before the end of the pass, so the result
stays *doubtful* until then: a weight that no rank used must keep having no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from backstash.weights.agreement import Kind, Request
from backstash.weights.bundle import Bundle
from backstash.weights.channel import Channel
from backstash.weights.order import Order
from backstash.weights.transfer import Gather, Reduction, send_gathers, send_reductions

#: Takes the reductions that have started, each with its place in the order if this rank had no
#: gradient and sent zeros, else with None.
Sent = Callable[[list[tuple[Bundle, Reduction, int | None]]], None]


class Progress:
    """One pass on this rank, and the buckets that it has started.

    Attributes:
        order: Of the pass.
        surprises: Uses that were not the next one of the order.
    """

    def __init__(
        self,
        order: Order,
        bundles: Sequence[Bundle],
        channel: Channel,
        wide: torch.dtype | None,
        sent: Sent,
    ) -> None:
        self.order = order
        self.surprises = 0
        self._bundles = bundles
        self._channel = channel
        self._wide = wide
        self._sent = sent
        self._next = 0
        self._started = 0
        self._gathers: dict[int, Gather] = {}
        self._given: dict[int, Reduction] = {}

    @property
    def is_changed(self) -> bool:
        """Whether this rank did anything but go through the order."""
        return self.surprises > 0

    def begin(self) -> None:
        """Start what is needed first."""
        self._start(self.order.first)

    def gather(self, request: Request) -> Gather | None:
        """The gather that has started for this use; None after the end of a broken order."""
        i = self._find(request)
        if i is None:
            return None
        self._start(self.order.ready[i])
        self._drop(before=i)
        gather = self._gathers.pop(i)
        self._start(self.order.ahead[i])
        if not gather.is_stale:
            return gather
        gather.drop()
        self._run_out_surprised()
        return None

    def reduce(self, request: Request, grads: Sequence[Tensor | None]) -> bool:
        """Take whole gradients in; False after the end of a broken order, which has no place."""
        i = self._find(request)
        if i is None:
            return False
        self._given[i] = self._bundles[request.bundle].prepare_reduction(grads, self._wide)
        self._start(self.order.ahead[i])
        self._drop(before=i)
        return True

    def run_out(self) -> None:
        """Join all that is left, for the others."""
        if self._next < len(self.order.uses):
            self._run_out_surprised()

    def abandon(self, *, waits: bool) -> None:
        """Forget what has started; wait for it where the other ranks are still there."""
        gathers, self._gathers = self._gathers, {}
        self._given.clear()
        self._next = len(self.order.uses)
        self._started = len(self.order.buckets)
        for gather in gathers.values() if waits else ():
            gather.drop()

    def _run_out_surprised(self) -> None:
        self.surprises += 1
        self._next = len(self.order.uses)
        while self._started < len(self.order.buckets):
            self._start(self._started + 1)
            self._drop(before=self._next)
        self._drop(before=self._next)

    def _find(self, request: Request) -> int | None:
        """The position of a use, behind the last one; else all that is left is joined."""
        uses, i = self.order.uses, self._next
        if i < len(uses) and uses[i] is request:
            self._next = i + 1
            return i
        try:
            i = uses.index(request, i)
        except ValueError:
            self._run_out_surprised()
            return None
        self.surprises += i != self._next
        self._next = i + 1
        return i

    def _drop(self, before: int) -> None:
        if self._gathers and min(self._gathers) < before:
            for i in [i for i in self._gathers if i < before]:
                self._gathers.pop(i).drop()

    def _start(self, until: int) -> None:
        if self._started >= until:
            return
        for bucket in self.order.buckets[self._started : until]:
            self._started += 1
            uses = [self.order.uses[i] for i in bucket]
            bundles = [self._bundles[use.bundle] for use in uses]
            if uses[0].kind is Kind.REDUCE:
                self._start_reductions(list(zip(bucket, bundles, strict=True)))
                continue
            gathers = [b.pack(use.usage) for use, b in zip(uses, bundles, strict=True)]
            send_gathers(gathers, self._channel)
            self._gathers.update(zip(bucket, gathers, strict=True))

    def _start_reductions(self, bucket: list[tuple[int, Bundle]]) -> None:
        started = []
        for i, bundle in bucket:
            given = self._given.pop(i, None)
            reduction = given or bundle.prepare_reduction(None, self._wide)
            started.append((bundle, reduction, i if given is None else None))
        send_reductions([reduction for _, reduction, _ in started], self._channel, self._wide)
        self._sent(started)
