"""One use of a bundle of weights: a gather, or the reduction of a gradient.

Each is finished exactly once: a gather by :meth:`Gather.take` or :meth:`Gather.drop`, a
reduction by :meth:`Reduction.finish`.  Until then it holds the memory that its state says.

Letters: P ranks, C rows of the longest shard, K columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from backstash.formats import Usage
from backstash.tensors import QuantizedTensor
from backstash.weights.channel import NOTHING, Arrival, Channel, Parcel
from backstash.weights.layout import Layout
from backstash.weights.states import State, move
from backstash.weights.travel import Travel, WeightKind, as_matrix


@dataclasses.dataclass(frozen=True)
class Member:
    """One weight of a bundle: its name, what it is whole, and how it travels."""

    name: str
    kind: WeightKind
    ways: dict[Usage, Travel]

    @property
    def layout(self) -> Layout:
        """Which rows each rank has."""
        return self.kind.layout


class Gather:
    """Whole weights on their way to one use."""

    def __init__(
        self,
        members: Sequence[Member],
        shards: Sequence[Tensor],
        amaxes: Sequence[Tensor | None],
        channel: Channel,
        usage: Usage,
    ) -> None:
        self.usage = usage
        self._members = members
        self._shards = shards
        self._versions = [shard._version for shard in shards]
        self._arrival = Arrival(NOTHING, [], [])
        self._sent = [
            member.ways[usage].pack(shard, member.layout, channel.rank, amax)
            for member, shard, amax in zip(members, shards, amaxes, strict=True)
        ]
        # With one rank what is handed out is the shard: no memory that could be freed.
        self._is_copy = channel.size > 1
        self._state = State.GATHERING
        self._storages: list[StorageWeakRef] = []

    @property
    def parcels(self) -> list[Parcel]:
        """What this rank sends."""
        return [parcel for sent in self._sent for parcel in sent.parcels.values()]

    def expect(self, arrival: Arrival) -> None:
        """Take what is on its way."""
        self._arrival = arrival

    @property
    def state(self) -> State:
        """GATHERED for as long as somebody holds what :meth:`take` gave."""
        if self._state is State.GATHERED and all(s.expired() for s in self._storages):
            self._state = State.SHARDED
        return self._state

    @property
    def is_stale(self) -> bool:
        """Whether a shard was changed since it was sent."""
        return [shard._version for shard in self._shards] != self._versions

    def take(self) -> list[Tensor]:
        """Wait, and hand the whole weights out; they live as long as somebody holds them."""
        self._state = move(self._state, State.GATHERING, State.GATHERED, "a gather")
        arrived = self._arrival.wait()
        wholes = []
        for member, sent in zip(self._members, self._sent, strict=True):
            mine, arrived = arrived[: len(sent.parcels)], arrived[len(sent.parcels) :]
            wholes.append(member.ways[self.usage].unpack(mine, sent, member.kind))
        if self._is_copy:
            self._storages = [
                StorageWeakRef(buffer.untyped_storage()) for w in wholes for buffer in _buffers(w)
            ]
        self._sent, self._shards = [], []
        return wholes

    def drop(self) -> None:
        """Wait, and let it go: nobody needs it."""
        self._state = move(self._state, State.GATHERING, State.SHARDED, "a gather")
        self._sent, self._shards = [], []
        self._arrival.wait()


class Reduction:
    """Gradients of whole weights on their way to gradients of shards.

    With ``wide`` each rank gets the other ranks' rows as they are and adds them up itself, in
    that dtype and in rank order; otherwise the collective adds, in the gradients' own dtype.
    The bytes on the wire are the same.
    """

    def __init__(
        self,
        members: Sequence[Member],
        grads: Sequence[Tensor],
        channel: Channel,
        wide: torch.dtype | None,
    ) -> None:
        self._channel = channel
        self._wide = wide
        self._members = members
        self._arrival = Arrival(NOTHING, [], [])
        self._wholes = [
            as_matrix(grad, member.layout.rows, member.layout.columns)
            for member, grad in zip(members, grads, strict=True)
        ]
        self._state = State.REDUCING

    def hand_over(self) -> list[tuple[Tensor, tuple[int, ...]]]:
        """The whole gradients and which rows each rank has, for the collective; once."""
        wholes, self._wholes = self._wholes, []
        counts = [member.layout.counts for member in self._members]
        return list(zip(wholes, counts, strict=True))

    def expect(self, arrival: Arrival) -> None:
        """Take what is on its way."""
        self._arrival = arrival

    @property
    def state(self) -> State:
        """REDUCING until it is finished."""
        return self._state

    def finish(self) -> list[Tensor]:
        """Wait, and give the sum over all ranks for each shard, in the dtype it was added in."""
        self._state = move(self._state, State.REDUCING, State.SHARDED, "a reduction")
        arrived = self._arrival.wait()
        if self._wide is not None:
            arrived = [self._added_up(rows, self._wide) for rows in arrived]
        rank = self._channel.rank
        pairs = zip(self._members, arrived, strict=True)
        return [_shard_of(rows, member.layout, rank) for member, rows in pairs]

    def _added_up(self, rows: Tensor, wide: torch.dtype) -> Tensor:
        first, *others = rows.chunk(self._channel.size) if len(rows) else [rows]
        total = first.to(wide, copy=True)
        for other in others:
            total += other
        return total


def send_gathers(gathers: Sequence[Gather], channel: Channel) -> None:
    """Start gathers in one collective; all ranks do, now."""
    parcels = [gather.parcels for gather in gathers]
    arrival = channel.gather([parcel for of_one in parcels for parcel in of_one])
    for gather, of_one in zip(gathers, parcels, strict=True):
        gather.expect(arrival.take_first(len(of_one)))


def send_reductions(
    reductions: Sequence[Reduction], channel: Channel, wide: torch.dtype | None
) -> None:
    """Start reductions in one collective; all ranks do, now."""
    pairs = [reduction.hand_over() for reduction in reductions]
    flat = [pair for of_one in pairs for pair in of_one]
    send = channel.scatter if wide is None else channel.exchange
    arrival = send([whole for whole, _ in flat], [counts for _, counts in flat])
    for reduction, of_one in zip(reductions, pairs, strict=True):
        reduction.expect(arrival.take_first(len(of_one)))


def _shard_of(rows: Tensor, layout: Layout, rank: int) -> Tensor:
    """Without padding, and in the shape of the shard."""
    shape = layout.shard_shape(rank)
    # To look is cheaper than to make a view: this is on the path of every weight.
    return rows if rows.shape == shape else rows[: layout.counts[rank]].view(shape)


def _buffers(whole: Tensor) -> list[Tensor]:
    return list(whole.buffers.values()) if isinstance(whole, QuantizedTensor) else [whole]
