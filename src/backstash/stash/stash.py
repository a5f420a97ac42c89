"""``Stash``: saved tensors into pages, and back when backward asks.

A handler for :class:`~backstash.saving.saving`.  It takes the buffers whose valid length was
marked, copies the valid prefix into pages of its pool, and lets the buffer go.  Backward reads
the pages, or gets the prefix copied into a new buffer before (:mod:`backstash.stash.returns`).
Copies do not round, so every gradient is that of a run without the stash, bit for bit.

All buffers that one autograd node saves are copied by one launch: the node announces them, and
the last of them closes the batch.  A tensor nobody announced is a batch of its own.  A node that
writes into pages itself asks for room before, and of that nothing is copied
(:mod:`backstash.stash.claimed`).

When a batch is copied is decided in :mod:`backstash.stash.departures`: once a step has shown in
which order backward asks, the matmuls of the next layer move a batch, or it stays where it is.

Nothing here knows a schedule.  A handle knows its pages; in what order handles are asked for,
how many microbatches there are, and whether a step is ever finished, makes no difference.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Iterator, Sequence

from torch import Tensor

from backstash.formats import Format
from backstash.kernels import MOST_BUFFERS, InPages, Moves, PoolState, has_slabs
from backstash.nn.options import check_kind, check_sizes
from backstash.saving import Fits, Place, valid_rows
from backstash.stash.admission import Account, Policy
from backstash.stash.batch import Batch, BatchState, Kept, Saved, Tail
from backstash.stash.claimed import ClaimedBatch
from backstash.stash.departures import Departures
from backstash.stash.expected import Announced, Expected
from backstash.stash.foresight import Foresight
from backstash.stash.launch import Matrices
from backstash.stash.packing import check_compression, packed_as
from backstash.stash.pool import PagePool
from backstash.stash.region import Content, Region, content_of, region_of
from backstash.stash.returns import Returns
from backstash.stash.statistics import Statistics


class Take(enum.Enum):
    """Which saved tensors a stash takes."""

    #: Those whose valid length was marked: the others would only be copied.
    MARKED = "marked"
    #: All that are larger than a page; what is not marked is taken whole.
    ALL = "all"


class Stash:
    """Keep saved tensors in pages of ``pool``, only as many rows as there are.

    Give it to ``saving``: ``with saving(Stash(pool)): loss = model(x)``.  It may be used again
    and again, by several threads, and several may share a pool.

    Args:
        pool: Where the pages are.
        policy: What becomes of a value for which there may be no room.
        take: Which saved tensors are taken.
        tail: What lies behind the valid rows of what backward gets.
        compress: ``MXFP8`` to quantize bfloat16, float16 and float32 values on their way into
            the pages, in blocks of 32 neighbours.  Lossy, so gradients are no longer those of a
            run without the stash; a quarter to a half of the bytes.
        ahead: How many batches are copied back before they are asked for, each at the price
            of its buffers at full capacity.  As many of the newest, and one more, are not copied
            at all where the last step has shown that backward begins with them.  Of a node that
            reads its pages nothing is copied back, and only the newest stays.

    Raises:
        ConfigError: An option means nothing, or values cannot be compressed like that.
        DeviceError: The pool's GPU cannot compress.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        policy: Policy = Policy.SPILL,
        take: Take = Take.MARKED,
        tail: Tail = Tail.UNSPECIFIED,
        compress: Format | None = None,
        ahead: int = 1,
    ) -> None:
        check_kind(PagePool, remedy="make one with PagePool(capacity_bytes)", pool=pool)
        check_kind(Policy, policy=policy)
        check_kind(Take, take=take)
        check_kind(Tail, tail=tail)
        check_sizes(ahead=ahead, remedy="it is a number of batches")
        check_compression(compress, pool.page_bytes, pool.device)
        self.pool = pool
        self.compress = compress
        self.policy = policy
        self.take = take
        self.tail = tail
        self.ahead = ahead
        self._is_marked_only = take is Take.MARKED
        self._expected = Expected()
        self._kept: weakref.WeakValueDictionary[tuple[Content, int | None], Kept]
        self._kept = weakref.WeakValueDictionary()
        self._departures = Departures(pool, ahead)
        self._foresight = Foresight(ahead)
        self._returns = Returns(pool, self._departures, self._foresight, tail=tail, ahead=ahead)
        self._live = self._returns.live
        self._number = 0
        self._unattended = False
        self._counts = dict.fromkeys(("claimed", "kept", "bytes_kept", "waits"), 0)

    # --- saving -----------------------------------------------------------------------------

    def expect(self, tensors: Sequence[Tensor]) -> None:
        """Learn which tensors one node is about to save, so that one launch takes them all."""
        if self._expected.saves_claimed(tensors):
            return
        offered: dict[Content, tuple[Tensor | None, Region]] = {}
        for tensor in tensors:
            rows = valid_rows(tensor)
            # Most of what is saved is not marked.
            region = None if rows is None and self._is_marked_only else self._region(tensor, rows)
            if region is not None:
                offered.setdefault(self._content(region, rows), (rows, region))
        # Most nodes save nothing that is marked.
        if not offered and not self._expected.announced:
            return
        with self.pool.turn():
            self._forget_expected()
            new = [c for c, (_, region) in offered.items() if not self._known(c, region.version)]
            for i in range(0, len(new), MOST_BUFFERS):
                contents = new[i : i + MOST_BUFFERS]
                batch = self._admit(contents)
                self._expected.announced += [Announced(*offered[c], c, batch) for c in contents]

    def claim(
        self, like: Tensor, columns: Sequence[int], rows: int, ends_G: Tensor
    ) -> list[Place] | None:
        """Places for matrices that a node is about to compute and to save, if there is room.

        A CUDA graph does not ask the host, so there the device finds out whether there is.
        """
        pool = self.pool
        if self.compress is not None or like.device != pool.device:
            return None
        # What is computed in pages is computed on the device.
        if (self.is_unattended and pool.host_size) or not has_slabs(like, columns, pool.page_bytes):
            return None
        matrices = Matrices(columns, like.dtype, rows, ends_G)
        worst = matrices.pages(pool.page_bytes)
        with pool.turn():
            self._expected.claimed = {}
            self._begin()
            account = None
            if not self.is_unattended:
                account = self._admit_on_device(worst)
                if account is None:
                    return None
            batch = ClaimedBatch(pool, self._number, account, matrices)
            self._count(batch)
            self._counts["claimed"] += 1
            found = batch.places()
        for place, saved in found:
            key = place.stand_in.untyped_storage()._cdata
            self._expected.claimed[key] = place.stand_in, saved
        return [place for place, _ in found]

    def multiply(self) -> Moves | None:
        """A matmul is launched next: what it may move meanwhile."""
        self._expected.multiplied = True
        batch = self._departures.carried()
        return None if batch is None else batch.moves(self.pool.streams.here())

    def pack(self, tensor: Tensor, rows: Tensor | None) -> Saved | None:
        """Take a tensor, or decline it where nothing would be gained or there is no room."""
        if self._expected.claimed:
            # Beside what a node has computed in pages, the rest is not worth a copy.
            claimed = self._expected.claimed.pop(tensor.untyped_storage()._cdata, None)
            return None if claimed is None else claimed[1]
        departures = self._departures
        departures.offers += 1
        # What is declined must cost next to nothing: most saved tensors are.
        region = content = None
        if rows is not None or not self._is_marked_only:
            one = self._expected.find(tensor, rows)
            if one is not None:
                region, content = one.region, one.content
            else:
                region = self._region(tensor, rows)
        if region is None and departures.offers < departures.next_landing:
            return None
        with self.pool.turn():
            if departures.offers >= departures.next_landing:
                departures.land(by=departures.offers)
            if region is None:
                return None
            return self._take(region, content or self._content(region, rows), tensor, rows)

    def _region(self, tensor: Tensor, rows: Tensor | None) -> Region | None:
        """The bytes to take of a tensor, or None where it is not for this stash."""
        if tensor.device != self.pool.device or tensor.untyped_storage().nbytes() == 0:
            return None
        region = region_of(tensor, marked=rows is not None)
        # A buffer that fits into one page would only be copied.
        if region is None or region.place.nbytes <= self.pool.page_bytes:
            return None
        return region

    def _content(self, region: Region, rows: Tensor | None) -> Content:
        return content_of(region, rows, packed_as(region.view.dtype, self.compress))

    def _known(self, content: Content, version: int | None) -> Kept | None:
        """The same bytes, or more of them, if they have been taken already."""
        for same in content.in_any():
            kept = self._kept.get((same, version))
            if kept is not None and not kept.storage.expired():
                return kept
        return None

    def _take(
        self, region: Region, content: Content, tensor: Tensor, rows: Tensor | None
    ) -> Saved | None:
        one = self._expected.pop(content)
        batch = None if one is None else one.batch
        # What is announced was not known, and is taken here for the first time.
        kept = self._known(content, region.version) if batch is None else None
        if kept is not None:
            kept.batch.shared.add(kept.slot)
        else:
            if one is None:
                batch = self._admit([content])
            if batch is None:
                return None
            kept = batch.add(region, rows, tensor, content.packed)
            self._kept[content, region.version] = kept
        if batch is not None and batch.originals and not self._expected.is_waiting(batch):
            self._close(batch)
        return Saved(kept, region.view)

    def _admit(self, contents: Sequence[Content]) -> Batch | None:
        """A new batch with pages reserved for the contents, or None if there may be no room."""
        self._begin()
        account: Account | None = None
        if not self.is_unattended:
            worst = self.pool.pages_of([(c.place.nbytes, c.packed) for c in contents])
            if self._departures.are_waiting:
                self._makes_room(worst)
            account, waits = self.pool.admit(worst, self.policy)
            self._counts["waits"] += waits
            if account is None:
                self._counts["kept"] += 1
                self._counts["bytes_kept"] += sum(c.place.nbytes for c in contents)
                self.pool.note_kept(worst)
                return None
        batch = Batch(self.pool, self._number, account)
        self._count(batch)
        return batch

    def _begin(self) -> None:
        """Where nothing is stashed a new round begins."""
        if not self._live:
            self._foresight.new_round()
            self._number = 0
            self.pool.adapt()

    def _makes_room(self, worst: int) -> bool:
        """Is there room on the device, when what waits has been sent?"""
        has_room = self.pool.has_room(worst)
        if not has_room and self._departures.are_waiting:
            # What those really take is known only once they have been copied.
            self._departures.send_all()
            has_room = self.pool.has_room(worst)
        return has_room

    def _admit_on_device(self, worst: int) -> Account | None:
        """Pages of the device, waited for if the policy says so."""
        waits = self.policy is Policy.WAIT
        if not waits and not self._makes_room(worst):
            return None
        account, waited = self.pool.admit(worst, Policy.WAIT if waits else Policy.KEEP)
        self._counts["waits"] += waited
        if account is None or account.is_on_device:
            return account
        self.pool.drop(account)
        return None

    def _count(self, batch: Batch) -> None:
        self._live[self._number] = batch
        self._number += 1

    def _close(self, batch: Batch) -> None:
        """A batch is complete: copy it at once, let the next matmuls move it, or wait."""
        multiplied, self._expected.multiplied = self._expected.multiplied, False
        # Compressed values must be those of the pages, whenever backward asks.
        if not multiplied or not self._foresight.has_seen_a_round or self.compress is not None:
            self._departures.send(batch)
        elif self._foresight.stays(batch.number):
            self._departures.wait(batch)
        else:
            self._departures.leave(batch)

    def _forget_expected(self) -> None:
        """What was announced and never saved is not waited for; what was saved of it goes."""
        announced, self._expected.announced = self._expected.announced, []
        for batch in dict.fromkeys([one.batch for one in announced]):
            if batch is not None and batch.originals and batch.state is BatchState.OPEN:
                self._close(batch)

    # --- coming back ------------------------------------------------------------------------

    def unpack(self, handle: Saved) -> Tensor:
        """The tensor again, in a buffer of its own unless the original is still there."""
        return self._returns.unpack(handle, newest=self._number - 1)

    def read(self, handle: Saved, fits: Fits) -> Tensor | InPages:
        """The same for a node that reads its pages where they are, if they fit."""
        return self._returns.read(handle, fits, newest=self._number - 1)

    # --- outside ----------------------------------------------------------------------------

    @property
    def is_unattended(self) -> bool:
        """Does the host not run along, so that the device must decide alone?"""
        return self._unattended or self.pool.streams.is_capturing()

    @property
    def is_idle(self) -> bool:
        """Does nobody hold anything that was stashed?"""
        return not self._live

    @contextlib.contextmanager
    def unattended(self) -> Iterator[None]:
        """Run as a CUDA graph does: no admission; without room, a flag is raised and zeros stay."""
        before, self._unattended = self._unattended, True
        try:
            yield
        finally:
            self._unattended = before

    def settle(self) -> None:
        """Copy what waits, let every original go, and give all pages back that can be.

        A captured region ends with this, so that what it took it also gives back.
        """
        with self.pool.turn():
            self._expected.claimed = {}
            self._forget_expected()
            self._departures.send_all()
            self._departures.land()
        self.pool.settle()
        self.pool.streams.join()

    def stats(self) -> Statistics:
        """What has been done so far; the host waits for the device, so not in every step."""
        counters = self.pool.counters()
        pool = self.pool
        return Statistics(
            page_bytes=pool.page_bytes,
            device_pages=pool.device_size,
            host_pages=pool.host_size,
            device_used=pool.device_size
            - counters[PoolState.TAIL_DEVICE]
            + counters[PoolState.HEAD_DEVICE],
            host_used=pool.host_size
            - counters[PoolState.TAIL_HOST]
            + counters[PoolState.HEAD_HOST],
            device_high=counters[PoolState.HIGH_DEVICE],
            host_high=counters[PoolState.HIGH_HOST],
            demand_high=counters[PoolState.DEMAND],
            bytes_stashed=counters[PoolState.BYTES_STASHED],
            bytes_restored=counters[PoolState.BYTES_RESTORED],
            pages_spilled=counters[PoolState.SPILLED],
            overflows=counters[PoolState.OVERFLOWS],
            shortage=counters[PoolState.SHORTAGE],
            growths=pool.growths,
            offered=self._departures.offers,
            batches=self._departures.sent,
            **self._counts,
            **self._returns.counts,
        )
