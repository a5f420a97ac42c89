"""The collectives that sharded weights are moved with.

A channel is a process group, told what is sent: matrices of which every rank has some rows.
Ranks need not have equally many; a collective wants equal sizes, so shorter ones are padded
on the wire and nowhere else.  All matrices of one call move in one coalesced collective, and
it runs while the caller does something else.

What fails here failed because another process is gone or stuck, and is raised as
:class:`~backstash.errors.PeerError`.  How long a stuck one is waited for is the timeout of
the process group.

Letters: P ranks, C rows of the longest shard, K columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from backstash.errors import ConfigError, PeerError
from backstash.weights.lease import Leases
from backstash.weights.peers import PeerMemory


class LostPeerError(PeerError):
    """A collective failed, so there is nobody any more to finish the others with."""


class Parcel(NamedTuple):
    """A matrix that travels: this rank's rows, and how many each rank has."""

    rows: Tensor
    counts: tuple[int, ...]

    @property
    def chunk(self) -> int:
        """C, rows of each rank on the wire."""
        return max(self.counts)

    @property
    def is_dense(self) -> bool:
        """Whether the padding of all ranks lies behind the last row of all."""
        total, chunk = sum(self.counts), self.chunk
        if total == chunk * len(self.counts):
            return True
        ideal = [max(0, min(chunk, total - rank * chunk)) for rank in range(len(self.counts))]
        return list(self.counts) == ideal


class Flight:
    """Collectives that were started together, each with what it reads."""

    def __init__(self, works: list[Any], arrived: torch.Event | None = None) -> None:
        self._works = works
        self._arrived = arrived
        self.parts = 0

    def wait(self, device: torch.device) -> None:
        """Wait once for all: a second wait can deliver a second time, over what came since."""
        if self._works:
            wait_all(self._works)
            if device.type == "cuda" and self.parts > 1:
                self._arrived = torch.cuda.current_stream(device).record_event()
        elif self._arrived is not None:
            # On this stream nobody may have waited yet.
            torch.cuda.current_stream(device).wait_event(self._arrived)


# With a sum, and without waiting.
_ADDING = dist.ReduceScatterOptions()
#: What nobody waits for.
NOTHING = Flight([])


class Arrival:
    """Matrices on their way; :meth:`wait` gives the whole of each, once.

    What was sent together can be parted with :meth:`take_first`.
    """

    def __init__(self, flight: Flight, wholes: list[Tensor], parcels: list[Parcel]) -> None:
        self._flight = flight
        self._wholes = wholes
        self._parcels = parcels

    def take_first(self, count: int) -> Arrival:
        """Part off the first so many matrices, to be waited for on their own."""
        first = Arrival(self._flight, self._wholes[:count], self._parcels[:count])
        self._wholes, self._parcels = self._wholes[count:], self._parcels[count:]
        self._flight.parts += 1
        return first

    def wait(self) -> list[Tensor]:
        """Wait for the collective, and give what it brought."""
        if self._wholes:
            self._flight.wait(self._wholes[0].device)
        # Whoever keeps the arrival for its state must not keep the memory.
        self._flight = NOTHING
        wholes, parcels, self._wholes, self._parcels = self._wholes, self._parcels, [], []
        return [_without_padding(w, p) for w, p in zip(wholes, parcels, strict=True)]


class Channel:
    """A process group and what went over it.

    Attributes:
        wire_bytes: Bytes of all weights and gradients sent, padding included, counted once for
            all ranks: what a gather of a weight in bf16 costs is two bytes an element.
        collectives: How many gathers and reductions of weights were started.
        agreements: How often the ranks agreed on what to do next.
        peers: Where the ranks read each other's shards, if they do.
        leases: The memory lent for what arrives.

    Raises:
        ConfigError: The group cannot answer on the host.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        if not _answers_on_host(group):
            raise ConfigError(
                "the ranks agree on each collective on the host, where the backend "
                f"{dist.get_backend(group)!r} cannot answer; give init_process_group (or "
                'new_group) the backend "cpu:gloo,cuda:nccl"'
            )
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.leases = Leases()
        self.peers: PeerMemory | None = None
        self.wire_bytes = 0
        self.collectives = 0
        self.agreements = 0

    def agree(self, code: int) -> tuple[int, int]:
        """The least and the largest number that any rank gave."""
        return self.wait_for(*self.post(code))

    def post(self, code: int) -> tuple[Any, Tensor]:
        """Give a number without waiting for the others; :meth:`wait_for` has the answer."""
        self.agreements += 1
        bounds = torch.tensor([code, -code], device="cpu")
        with _Peers("agree on the next collective"):
            work = dist.all_reduce(bounds, dist.ReduceOp.MIN, group=self.group, async_op=True)
        return work, bounds

    def wait_for(self, work: Any, bounds: Tensor) -> tuple[int, int]:
        """The answer to :meth:`post`."""
        wait_all([work])
        least, negated = bounds.tolist()
        return least, -negated

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Which flags are set on any rank."""
        votes = torch.tensor(list(flags), dtype=torch.int64, device="cpu")
        with _Peers("compare their gradients"):
            dist.all_reduce(votes, dist.ReduceOp.MAX, group=self.group)
        return votes.bool().tolist()

    def largest(self, x: Tensor) -> Tensor:
        """Elementwise maximum over the ranks."""
        if self.size > 1:
            x = x.clone()
            self.wire_bytes += x.nbytes
            with _Peers("agree on a scale"):
                dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def total(self, x: Tensor) -> Tensor:
        """Elementwise sum over the ranks."""
        if self.size > 1:
            x = x.clone()
            with _Peers("add up"):
                dist.all_reduce(x, group=self.group)
        return x

    def gather(self, parcels: list[Parcel]) -> Arrival:
        """Bring the rows of all ranks together."""
        if self.size == 1:
            return Arrival(Flight([]), [parcel.rows for parcel in parcels], parcels)
        if self.peers is not None and self.peers.holds([parcel.rows for parcel in parcels]):
            return self._pull(self.peers, parcels)
        sent = [_padded(p.rows, p.chunk) for p in parcels]
        first = sent[0]
        # A coalesced collective takes one dtype, and codes travel with float scales; gloo does
        # not take every dtype.
        as_bytes = not first.is_cuda or any(rows.dtype is not first.dtype for rows in sent)
        if as_bytes:
            sent = [rows.view(torch.uint8) for rows in sent]
        wholes = [
            self.leases.lend((self.size * x.shape[0], *x.shape[1:]), x.dtype, x.device)
            for x in sent
        ]
        self.wire_bytes += sum(whole.nbytes for whole in wholes)
        self.collectives += 1
        with _Peers("gather a weight"):
            if len(sent) == 1:
                work = self.group._allgather_base(wholes[0], sent[0])
            else:
                work = self.group.allgather_into_tensor_coalesced(wholes, sent)
        # A collective reads what is sent until it is done, so the works hold it.
        if as_bytes:
            wholes = [w.view(p.rows.dtype) for w, p in zip(wholes, parcels, strict=True)]
        return Arrival(Flight([(work, sent)]), wholes, parcels)

    def _pull(self, peers: PeerMemory, parcels: list[Parcel]) -> Arrival:
        """Copy the rows of the other ranks, without padding and without these ranks."""
        wholes = [
            self.leases.lend((sum(p.counts), *p.rows.shape[1:]), p.rows.dtype, p.rows.device)
            for p in parcels
        ]
        self.collectives += 1
        self.wire_bytes += sum(whole.nbytes for whole in wholes)
        pairs = zip(parcels, wholes, strict=True)
        arrived = peers.pull([(p.rows, whole, p.counts) for p, whole in pairs])
        whole_parcels = [Parcel(whole, (len(whole),)) for whole in wholes]
        return Arrival(Flight([], arrived), wholes, whole_parcels)

    def fence(self) -> None:
        """Let no GPU go on before all have come here; no host waits."""
        if self.peers is not None:
            with _Peers("wait for each other"):
                dist.all_reduce(self.peers.token, group=self.group)

    def scatter(self, wholes: list[Tensor], counts: list[tuple[int, ...]]) -> Arrival:
        """Add the ranks' matrices up and bring each rank its rows, in the matrices' dtype."""
        mine = [rows[self.rank] for rows in counts]
        parcels = [Parcel(whole, (rows,)) for whole, rows in zip(wholes, mine, strict=True)]
        if self.size == 1:
            return Arrival(Flight([]), wholes, parcels)
        sent = [_spread(whole, rows) for whole, rows in zip(wholes, counts, strict=True)]
        shards = [x.new_empty(x.shape[0] // self.size, *x.shape[1:]) for x in sent]
        self.wire_bytes += sum(rows.nbytes for rows in sent)
        self.collectives += 1
        with _Peers("reduce a gradient"):
            if len(sent) == 1:
                work = self.group._reduce_scatter_base(shards[0], sent[0], _ADDING)
            else:
                work = self.group.reduce_scatter_tensor_coalesced(shards, sent)
        return Arrival(Flight([(work, sent)]), shards, parcels)

    def exchange(self, wholes: list[Tensor], counts: list[tuple[int, ...]]) -> Arrival:
        """Bring each rank its rows of every rank's matrix, ``(P C, K)``, not added up."""
        sent = [_spread(whole, rows) for whole, rows in zip(wholes, counts, strict=True)]
        parcels = [Parcel(rows, (len(rows),)) for rows in sent]
        if self.size == 1:
            return Arrival(Flight([]), sent, parcels)
        self.wire_bytes += sum(rows.nbytes for rows in sent)
        arrived = [torch.empty_like(rows) for rows in sent]
        self.collectives += 1
        with _Peers("reduce a gradient"):
            works = [
                (dist.all_to_all_single(new, rows, group=self.group, async_op=True), rows)
                for new, rows in zip(arrived, sent, strict=True)
            ]
        return Arrival(Flight(works), arrived, parcels)


def wait_all(works: list[Any]) -> None:
    """Wait for collectives.

    Raises:
        PeerError: One did not come to its end.
    """
    with _Peers("finish a collective"):
        while works:
            work = works.pop()
            (work[0] if isinstance(work, tuple) else work).wait()


class _Peers:
    """Where a collective fails, a peer is lost."""

    # A class, because contextlib's generators cost several times as much, and this is on the
    # path of every weight.
    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, RuntimeError) or isinstance(error, PeerError):
            return
        raise LostPeerError(
            f"the ranks of this group were to {self._what}, but another one has gone or did not "
            f"answer in time ({error}); look at the output of the other ranks, and start all again"
        ) from error


def _answers_on_host(group: dist.ProcessGroup) -> bool:
    return torch.device("cpu") in group._device_types


def _padded(rows: Tensor, chunk: int) -> Tensor:
    if rows.shape[0] == chunk:
        return rows.contiguous()
    padded = rows.new_zeros(chunk, *rows.shape[1:])
    padded[: len(rows)] = rows
    return padded


def _spread(whole: Tensor, counts: tuple[int, ...]) -> Tensor:
    """The rows of each rank from a multiple of C on: ``(P C, K)``."""
    parcel = Parcel(whole, counts)
    if parcel.is_dense:
        return _padded(whole, parcel.chunk * len(counts))
    pieces = whole.split(list(counts))
    return torch.cat([_padded(piece, parcel.chunk) for piece in pieces])


def _without_padding(whole: Tensor, parcel: Parcel) -> Tensor:
    total, chunk = sum(parcel.counts), parcel.chunk
    if parcel.is_dense:
        return whole if whole.shape[0] == total else whole[:total]
    starts = range(0, chunk * len(parcel.counts), chunk)
    pairs = zip(starts, parcel.counts, strict=True)
    return torch.cat([whole[start : start + count] for start, count in pairs])
