"""Several ranks in one process: what each of them would send, put together by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backstash.tensors import QuantizedTensor
from backstash.weights.layout import Layout
from backstash.weights.travel import Travel, WeightKind


def gathered(way: Travel, full: Tensor, layout: Layout, ranks: int) -> Any:
    """The whole weight as it arrives when each rank has packed its shard."""

    shards = [layout.shard(full, rank).clone() for rank in range(ranks)]
    amax = None
    if way.question is not None:
        asked = [way.question.ask(shard, layout, rank) for rank, shard in enumerate(shards)]
        amax = torch.stack(asked).amax(0)
    sent = [way.pack(shard, layout, rank, amax) for rank, shard in enumerate(shards)]
    arrived = []
    for name, parcel in sent[0].parcels.items():
        rows = [s.parcels[name].rows for s in sent]
        assert [len(r) for r in rows] == list(parcel.counts)
        arrived.append(torch.cat(rows))
    return way.unpack(arrived, sent[-1], WeightKind(layout, full.dtype))


def buffers_of(tensor: Tensor) -> dict[str, Tensor]:
    return tensor.buffers if isinstance(tensor, QuantizedTensor) else {"values": tensor}
