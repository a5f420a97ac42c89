"""Reductions that are running: gradients of shards, until they are added to their parameters.

A few of them run while backward computes the next gradients; each holds a whole gradient until
it is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from backstash.weights.bundle import Bundle
from backstash.weights.transfer import Reduction


class Arrivals:
    """The reductions of one pass.

    Args:
        divisor: What a sum over the ranks is divided by.
        running: How many buckets may be on their way at once.
    """

    def __init__(self, divisor: int, running: int) -> None:
        self._divisor = divisor
        self._running = running
        self._buckets: deque[list[tuple[Bundle, Reduction, int | None]]] = deque()
        self._doubtful: dict[int, tuple[Bundle, list[Tensor]]] = {}

    def expect(self, bucket: list[tuple[Bundle, Reduction, int | None]]) -> None:
        """Take reductions that have started, each with its place in the order if doubtful."""
        self._buckets.append(bucket)
        self._finish(self._running)

    def take_last(self) -> list[Tensor]:
        """Wait for the reduction that has just started, and give what arrived."""
        ((_, shares, _),) = self._take(self._buckets.pop())
        return shares

    def finish(self) -> None:
        """Bring all that is on its way where it belongs, but for what is doubtful."""
        self._finish(0)

    def doubts(self) -> set[int]:
        """Places in the order of what arrived and is doubtful."""
        return set(self._doubtful)

    def settle(self, is_used: Callable[[int], bool]) -> None:
        """Deliver what some rank did give a gradient for, and forget the other doubtful ones."""
        doubtful, self._doubtful = self._doubtful, {}
        for place, (bundle, shares) in doubtful.items():
            if is_used(place):
                add_to_buffers(bundle, shares)

    def abandon(self, *, waits: bool) -> None:
        """Forget all; wait for it where the other ranks are still there."""
        buckets, self._buckets = self._buckets, deque()
        self._doubtful.clear()
        for bucket in buckets if waits else ():
            for _, reduction, _ in bucket:
                reduction.finish()

    def _finish(self, running: int) -> None:
        while len(self._buckets) > running:
            for bundle, shares, doubtful in self._take(self._buckets.popleft()):
                if doubtful is None:
                    add_to_buffers(bundle, shares)
                else:
                    self._doubtful[doubtful] = bundle, shares

    def _take(
        self, bucket: list[tuple[Bundle, Reduction, int | None]]
    ) -> list[tuple[Bundle, list[Tensor], int | None]]:
        """Wait, and divide all that came together in one launch."""
        arrived = [(bundle, r.finish(), doubtful) for bundle, r, doubtful in bucket]
        if self._divisor != 1:
            every = [share for _, shares, _ in arrived for share in shares]
            torch._foreach_div_(every, self._divisor)  # pyright: ignore[reportPrivateImportUsage]
        return arrived


def add_to_buffers(bundle: Bundle, shares: Sequence[Tensor]) -> None:
    """Add to ``main_grad`` of weights that have one, else to ``grad``."""
    with torch.no_grad():
        for weight, share in zip(bundle.weights, shares, strict=True):
            weight.add_gradient(share)
