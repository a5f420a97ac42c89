"""Several ranks in one process: what each of them would send, put together by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backstash.tensors import QuantizedTensor
from backstash.weights.layout import Layout
from backstash.weights.travel import Sent, Travel, WeightKind


class Alone:
    """A channel of one rank among several that are not there: it answers for them."""

    def __init__(self, rank: int, size: int, largest: Tensor | None = None) -> None:
        self.rank, self.size = rank, size
        self._largest = largest
        self.asked: Tensor | None = None

    def largest(self, x: Tensor) -> Tensor:
        """The answer to the one question that is asked; None where the test finds it out."""
        self.asked = x
        return x if self._largest is None else self._largest


def gathered(way: Travel, full: Tensor, layout: Layout, ranks: int) -> Any:
    """The whole weight as it arrives when each rank has packed its shard."""

    def pack(largest: Tensor | None) -> tuple[list[Sent], list[Tensor]]:
        sent, asked = [], []
        for rank in range(ranks):
            channel: Any = Alone(rank, ranks, largest)
            sent.append(way.pack(layout.shard(full, rank).clone(), layout, channel))
            asked += [channel.asked] if channel.asked is not None else []
        return sent, asked

    # Once to hear what each rank asks, and again with the answer.
    _, asked = pack(None)
    sent, _ = pack(torch.stack(asked).amax(0) if asked else None)
    arrived = []
    for name, parcel in sent[0].parcels.items():
        rows = [s.parcels[name].rows for s in sent]
        assert [len(r) for r in rows] == list(parcel.counts)
        arrived.append(torch.cat(rows))
    return way.unpack(arrived, sent[-1], WeightKind(layout, full.dtype))


def buffers_of(tensor: Tensor) -> dict[str, Tensor]:
    return tensor.buffers if isinstance(tensor, QuantizedTensor) else {"values": tensor}
