"""``PagePool``: bytes in pages, on the device and in host memory; it knows nothing of autograd.

A *page* is a power of two of bytes.  A *launch* copies a few buffers into pages at once; its
table, on the device, says which.  Pages are taken on the device first and in host memory when
those are used up, so one buffer may lie partly on each.

Whoever holds a launch holds its pages.  ``drop`` may be called by any thread at any time, by
a finalizer too: where the pool is busy, whoever is using it gives the pages back on leaving.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from backstash import kernels
from backstash.errors import ConfigError
from backstash.kernels import Moves, PoolState
from backstash.nn.options import check_kind, check_sizes
from backstash.stash.admission import Account, Policy
from backstash.stash.dropped import Dropped, Turn
from backstash.stash.launch import Buffer, Launch
from backstash.stash.memory import Memory, pool_device
from backstash.stash.packing import payload_bytes
from backstash.stash.sizing import Need, Sizing
from backstash.stash.streams import Event, Stream, streams_of

PAGE_BYTES = 1 << 16
_LEAST_PAGE_BYTES = 16


class PagePool:
    """Pages that all layers share.

    Args:
        capacity_bytes: Bytes on the device, rounded down to whole pages.
        host_bytes: Bytes in (pinned) host memory, for what the device has no room for.
        device: Where it is; default the GPU if there is one, else the CPU.
        page_bytes: Bytes of a page, a power of two from 16 up.
        sizing: How the pool follows what is needed, between rounds; default not at all.

    Raises:
        ConfigError: A size means nothing.
        DeviceError: There are no kernels for the device.
    """

    def __init__(
        self,
        capacity_bytes: int,
        host_bytes: int = 0,
        *,
        device: torch.device | str | None = None,
        page_bytes: int = PAGE_BYTES,
        sizing: Sizing | None = None,
    ) -> None:
        check_sizes(capacity_bytes=capacity_bytes, host_bytes=host_bytes, page_bytes=page_bytes)
        if page_bytes < _LEAST_PAGE_BYTES or page_bytes & (page_bytes - 1):
            raise ConfigError(
                f"page_bytes must be a power of two from {_LEAST_PAGE_BYTES} up, got {page_bytes}"
            )
        if sizing is not None:
            check_kind(Sizing, remedy="make one with Sizing(margin=1.1)", sizing=sizing)
        self.device = pool_device(device)
        self.page_bytes = page_bytes
        self.sizing = sizing
        self.streams = streams_of(self.device)
        self.growths = 0
        #: A graph holds the addresses of this memory, so it stays where it is.
        self.is_fixed = False
        self._lock = threading.Lock()
        self._dropped = Dropped()
        #: The valid length of a buffer that is one row, and valid as a whole.
        self.one_row = torch.ones(1, dtype=torch.int32, device=self.device)
        pinned = self.device.type == "cuda"
        answers = torch.zeros(2, len(PoolState), dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._need, self._read = Need(0.0, answers[0]), answers[1]
        self.memory = self._allocate(capacity_bytes // page_bytes, host_bytes // page_bytes)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ConfigError(
            "a pool of pages can be neither copied nor pickled: graphs of this process hold its "
            "pages; make another pool and stash, and keep a stash out of a model that is copied"
        )

    @classmethod
    def auto(
        cls,
        *,
        estimate_bytes: int = 0,
        host_bytes: int = 0,
        device: torch.device | str | None = None,
        page_bytes: int = PAGE_BYTES,
        sizing: Sizing | None = None,
    ) -> PagePool:
        """A pool that follows what is needed, starting from an estimate.

        Until it has seen a round, what finds no room is kept by its owner.
        """
        check_sizes(estimate_bytes=estimate_bytes)
        sizing = sizing or Sizing()
        pages = sizing.pages(-(-estimate_bytes // page_bytes), page_bytes)
        pool = cls(
            pages * page_bytes, host_bytes, device=device, page_bytes=page_bytes, sizing=sizing
        )
        pool._need.pages = estimate_bytes / page_bytes
        return pool

    def __del__(self) -> None:
        # What was launched may still write receipts, and read and write pages of the host.
        if hasattr(self, "memory") and not sys.is_finalizing():
            self.streams.hold(self.memory.host_pages, self.memory.ledger.receipts)

    @property
    def device_size(self) -> int:
        """Pages on the device."""
        return self.memory.device_pages.numel() // self.page_bytes

    @property
    def host_size(self) -> int:
        """Pages in host memory."""
        return self.memory.host_pages.numel() // self.page_bytes

    def turn(self) -> contextlib.AbstractContextManager[None]:
        """Use the pool alone; what was dropped meanwhile is given back after it, if it is due."""
        return Turn(self._lock, self._dropped, self.settle)

    def settle(self) -> None:
        """Give back what was dropped, unless someone is at it already."""
        while self._dropped and self._dropped.has_some(capturing=self.streams.is_capturing()):
            if not self._lock.acquire(blocking=False):
                return
            try:
                self._give_back()
            finally:
                self._lock.release()

    def pages_of(self, buffers: Iterable[tuple[int, torch.dtype]]) -> int:
        """Pages that buffers of so many bytes, packed as such a dtype, fill if all is valid."""
        return sum([-(-nbytes // payload_bytes(d, self.page_bytes)) for nbytes, d in buffers])

    def has_room(self, worst: int) -> bool:
        """Inside :meth:`turn`: is there room on the device, as far as the host knows by now?"""
        self._give_back()
        self.memory.ledger.poll()
        return self.memory.ledger.room(worst)

    def admit(self, worst: int, policy: Policy) -> tuple[Account | None, int]:
        """Reserve ``worst`` pages, inside :meth:`turn`; None if there may be no room.

        Returns:
            The account, and how often the host waited (0 or 1).
        """
        ledger, waits = self.memory.ledger, 0
        fits = self.has_room(worst)
        if not fits and policy is Policy.WAIT:
            waits = 1
            fits = ledger.wait(self.streams.host_wait, worst)
        if not fits and policy is not Policy.KEEP:
            fits = ledger.room(worst, spilling=True)
        return ledger.open(worst) if fits else None, waits

    def begin(self) -> tuple[Memory, bool]:
        """Inside :meth:`turn`, before pages are taken: where, and whether into a CUDA graph."""
        self._give_back()
        captured = self.streams.is_capturing()
        self.is_fixed |= captured
        return self.memory, captured

    def stash(
        self,
        buffers: Sequence[Buffer],
        account: Account | None,
        number: int,
        *,
        after: Event = None,
        leaving: bool = False,
    ) -> Launch:
        """Copy buffers into pages, inside :meth:`turn`; they must live until ``done``.

        The copy waits for ``after``, or else for what computes now.  With ``leaving`` the launch
        may have moves to be made.
        """
        memory, captured = self.begin()
        slots = self.pages_of([(b.data.nbytes, b.data.dtype) for b in buffers])
        few = None if account is None else account.programs
        moves = self._new_moves(slots) if leaving and few is None else None
        # A list of moves may be memory that what computes has still to fill, or to let go.
        behind = self.streams.here() if after is None or moves is not None else after
        with self.streams.outward([behind]):
            length = kernels.table_length(len(buffers), slots)
            table = torch.empty(length, dtype=torch.int64, device=self.device)
            kernels.stash_pages(
                [buffer.data for buffer in buffers],
                [buffer.rows for buffer in buffers],
                [buffer.width for buffer in buffers],
                table,
                memory.device_pages,
                memory.host_pages,
                memory.free_N,
                memory.state,
                memory.ledger.receipt_of(account),
                page_bytes=self.page_bytes,
                number=number,
                moves=moves,
                programs=few,
            )
            done = self.streams.event()
        if account is not None:
            memory.ledger.launched(account, done)
        return Launch(
            table=table,
            buffers=len(buffers),
            account=account,
            done=done,
            captured=captured,
            memory=memory,
            moves=moves,
        )

    def restore(
        self,
        launch: Launch,
        destinations: Sequence[Tensor],
        places: Sequence[int],
        *,
        leaving: bool = False,
    ) -> tuple[Event, Moves | None]:
        """Copy buffers back, inside :meth:`turn`; they hold their values behind the event.

        Each of ``destinations`` has the dtype that was stashed.  With ``leaving`` there may be
        moves to be made behind the event.
        """
        memory, moves = launch.memory, None
        few = None if launch.account is None else launch.account.programs
        if leaving and few is None:
            slots = self.pages_of([(d.nbytes, d.dtype) for d in destinations])
            moves = self._new_moves(slots)
        # The destinations may be memory that what computes has let go, and is still using.
        with self.streams.inward([launch.done, self.streams.here()]):
            kernels.restore_pages(
                destinations,
                places,
                launch.table,
                memory.device_pages,
                memory.host_pages,
                memory.state,
                buffers=launch.buffers,
                page_bytes=self.page_bytes,
                moves=moves,
                programs=few,
            )
            done = self.streams.event()
        launch.reads.append(done)
        return done, moves

    def finish(self, launch: Launch, moves: Moves, stream: Stream, *, after: Event) -> Event:
        """Make what is left of a launch's moves, of which matmuls made some, behind ``after``."""
        if after is not None:
            self.streams.wait(after, stream)
        with self.streams.on(stream):
            kernels.finish_moves(moves)
        launch.reads.append(stream)
        return stream

    def _new_moves(self, slots: int) -> Moves:
        return kernels.new_moves(slots, self.memory.device_pages, self.page_bytes)

    def drop(self, held: Launch | Account) -> None:
        """Give pages back, or the reservation of what was never stashed; from any thread."""
        self._dropped.add(held)
        if self._dropped.is_due():
            self.settle()

    def abandon_capture(self) -> None:
        """Forget what was recorded into a graph that will never run: it has taken no page."""
        with self._lock:
            self._dropped.forget_captured()
        self.is_fixed = False

    def counters(self) -> dict[PoolState, int]:
        """The counters on the device, by one read for which the host waits."""
        with self.turn():
            self._give_back()
            self.streams.join()
            self._read.copy_(self.memory.state, non_blocking=True)
            self.streams.host_wait(self.streams.event())
            values: list[int] = self._read.tolist()
        return dict(zip(PoolState, values, strict=True))

    def clear_overflow(self) -> None:
        """Forget the overflows that were seen."""
        with self.turn():
            self.streams.join()
            for place in (PoolState.OVERFLOWS, PoolState.SHORTAGE, PoolState.FIRST_OVERFLOW):
                self.memory.state[place].zero_()

    def is_empty(self) -> bool:
        """Is nothing held, as far as the host knows?"""
        self.settle()
        return not self._dropped and self.memory.ledger.bound == 0

    def note_kept(self, worst: int) -> None:
        """Count pages that would have been wanted too, had there been room for them."""
        ledger = self.memory.ledger
        share = ledger.pages_arrived / ledger.worst_arrived if ledger.worst_arrived else 1.0
        self._need.note_kept(worst * share)

    def grow(self, capacity_bytes: int) -> bool:
        """Replace the memory by more of it; returns whether there is more now.

        Addresses change: a CUDA graph that was captured with the old ones must not run again.

        Raises:
            ConfigError: Pages are in use.
        """
        pages = capacity_bytes // self.page_bytes
        if self.sizing is not None:
            pages = self.sizing.limit(pages, self.page_bytes)
        with self.turn():
            self._give_back()
            if not self.is_empty():
                raise ConfigError(
                    f"a pool can grow only while no page is in use, but up to "
                    f"{self.memory.ledger.bound} are; run backward first, or drop the graph"
                )
            return pages > self.device_size and self._replace(pages)

    def adapt(self) -> None:
        """Follow what earlier rounds needed, inside :meth:`turn` and between rounds.

        What the last round needed is asked of the device now and read when it has arrived.
        """
        if self.sizing is None or self.is_fixed:
            return
        self._give_back()
        if not self.is_empty() or self.streams.is_capturing():
            return
        need = self._need.after_round(self.sizing, self.memory.state, self.streams)
        if need is None:
            return
        pages = self.sizing.pages(need, self.page_bytes)
        if pages > self.device_size or pages < self.device_size // 2:
            self._replace(pages)

    def _give_back(self) -> None:
        if not self._dropped:
            return
        launches: list[Launch] = []
        for held in self._dropped.take(capturing=self.streams.is_capturing()):
            if isinstance(held, Account):
                self.memory.ledger.close(held, launched=False)
            else:
                launches.append(held)
        # They are those of one memory, but for some of a graph that has outlived its own.
        for memory, some in itertools.groupby(launches, key=lambda launch: launch.memory):
            those = list(some)
            for i in range(0, len(those), kernels.MOST_RELEASED):
                self._release(memory, those[i : i + kernels.MOST_RELEASED])

    def _release(self, memory: Memory, launches: Sequence[Launch]) -> None:
        behind = [self.streams.here()]
        for event in itertools.chain(*[launch.reads for launch in launches]):
            if event not in behind:
                behind.append(event)
        with self.streams.outward(behind):
            kernels.release_pages(
                [launch.table for launch in launches],
                memory.free_N,
                memory.state,
                buffers=[launch.buffers for launch in launches],
                device_size=memory.device_pages.numel() // self.page_bytes,
            )
        for launch in launches:
            if launch.account is not None:
                memory.ledger.close(launch.account, launched=True)

    def _allocate(self, device_size: int, host_size: int) -> Memory:
        return Memory.allocate(device_size, host_size, self.page_bytes, self.device)

    def _replace(self, device_size: int) -> bool:
        before, host_size = self.device_size, self.host_size
        # The old memory goes first, behind whatever still reads it: both need not fit at once.
        self.streams.join()
        self.streams.hold(self.memory.host_pages, self.memory.ledger.receipts)
        del self.memory
        try:
            self.memory = self._allocate(device_size, host_size)
        except torch.OutOfMemoryError:
            self.memory = self._allocate(before, host_size)
            return False
        self.growths += device_size > before
        return True
