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

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from backstash.errors import ConfigError, PeerError
from backstash.weights.lease import Leases
from backstash.weights.peers import PeerMemory


class LostPeerError(PeerError):
    """A collective failed, so there is nobody any more to finish the others with."""


@dataclasses.dataclass(frozen=True)
class Parcel:
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
        ideal = [max(0, min(chunk, total - rank * chunk)) for rank in range(len(self.counts))]
        return list(self.counts) == ideal


class Flight:
    """Collectives that were started together, each with what it reads."""

    def __init__(self, works: list[Any], arrived: torch.Event | None = None) -> None:
        self._works = works
        self._arrived = arrived

    def wait(self, device: torch.device) -> None:
        """Wait once for all: a second wait can deliver a second time, over what came since."""
        if self._works:
            wait_all(self._works)
            if device.type == "cuda":
                self._arrived = torch.cuda.current_stream(device).record_event()
        elif self._arrived is not None:
            # On this stream nobody may have waited yet.
            torch.cuda.current_stream(device).wait_event(self._arrived)


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
        return first

    def wait(self) -> list[Tensor]:
        """Wait for the collective, and give what it brought."""
        if self._wholes:
            self._flight.wait(self._wholes[0].device)
        # Whoever keeps the arrival for its state must not keep the memory.
        self._flight = Flight([])
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
        bounds = torch.tensor([code, -code])
        with _peers("agree on the next collective"):
            work = dist.all_reduce(bounds, dist.ReduceOp.MIN, group=self.group, async_op=True)
        return work, bounds

    def wait_for(self, work: Any, bounds: Tensor) -> tuple[int, int]:
        """The answer to :meth:`post`."""
        wait_all([work])
        least, negated = bounds.tolist()
        return least, -negated

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Which flags are set on any rank."""
        votes = torch.tensor(list(flags), dtype=torch.int64)
        with _peers("compare their gradients"):
            dist.all_reduce(votes, dist.ReduceOp.MAX, group=self.group)
        return votes.bool().tolist()

    def largest(self, x: Tensor) -> Tensor:
        """Elementwise maximum over the ranks."""
        if self.size > 1:
            x = x.clone()
            self.wire_bytes += x.nbytes
            with _peers("agree on a scale"):
                dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def total(self, x: Tensor) -> Tensor:
        """Elementwise sum over the ranks."""
        if self.size > 1:
            x = x.clone()
            with _peers("add up"):
                dist.all_reduce(x, group=self.group)
        return x

    def gather(self, parcels: list[Parcel]) -> Arrival:
        """Bring the rows of all ranks together."""
        if self.size == 1:
            return Arrival(Flight([]), [parcel.rows for parcel in parcels], parcels)
        if self.peers is not None and self.peers.holds([parcel.rows for parcel in parcels]):
            return self._pull(self.peers, parcels)
        # As bytes: a coalesced collective takes one dtype, and codes travel with float scales.
        sent = [_padded(p.rows, p.chunk).view(torch.uint8) for p in parcels]
        wholes = [
            self.leases.lend((self.size * len(rows), *rows.shape[1:]), rows.dtype, rows.device)
            for rows in sent
        ]
        self.wire_bytes += sum(whole.nbytes for whole in wholes)
        self.collectives += 1
        with _peers("gather a weight"):
            work = self.group.allgather_into_tensor_coalesced(wholes, sent)
        # A collective reads what is sent until it is done, so the works hold it.
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
            with _peers("wait for each other"):
                dist.all_reduce(self.peers.token, group=self.group)

    def scatter(self, wholes: list[Tensor], counts: list[tuple[int, ...]]) -> Arrival:
        """Add the ranks' matrices up and bring each rank its rows, in the matrices' dtype."""
        mine = [rows[self.rank] for rows in counts]
        parcels = [Parcel(whole, (rows,)) for whole, rows in zip(wholes, mine, strict=True)]
        if self.size == 1:
            return Arrival(Flight([]), wholes, parcels)
        sent = [_spread(whole, rows) for whole, rows in zip(wholes, counts, strict=True)]
        shards = [rows.new_empty(len(rows) // self.size, *rows.shape[1:]) for rows in sent]
        self.wire_bytes += sum(rows.nbytes for rows in sent)
        self.collectives += 1
        with _peers("reduce a gradient"):
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
        with _peers("reduce a gradient"):
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
    with _peers("finish a collective"):
        while works:
            work = works.pop()
            (work[0] if isinstance(work, tuple) else work).wait()


@contextlib.contextmanager
def _peers(what: str) -> Iterator[None]:
    try:
        yield
    except PeerError:
        raise
    except RuntimeError as error:
        raise LostPeerError(
            f"the ranks of this group were to {what}, but another one has gone or did not answer "
            f"in time ({error}); look at the output of the other ranks, and start all again"
        ) from error


def _answers_on_host(group: dist.ProcessGroup) -> bool:
    return torch.device("cpu") in group._device_types


def _padded(rows: Tensor, chunk: int) -> Tensor:
    if len(rows) == chunk:
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
        return whole[:total]
    starts = range(0, chunk * len(parcel.counts), chunk)
    pairs = zip(starts, parcel.counts, strict=True)
    return torch.cat([whole[start : start + count] for start, count in pairs])
