"""Who may stash, decided on the host without asking the device.

The host does not know how many rows are valid, only how many there can be.  It keeps an upper
bound of the pages in use: of a stash whose receipt has arrived the pages it really took, of
one still under way its worst case.  Receipts are written into host memory by the launch itself
and looked at, never waited for, unless the policy says so.

A stash is admitted if the bound and its worst case fit into the pool together, so that one
that was admitted cannot overflow.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Callable

import torch
from torch import Tensor

from backstash.errors import BackstashError
from backstash.kernels import RECEIPT_HOST_SHIFT, RECEIPT_OVERFLOW, RECEIPT_PENDING

_RECEIPTS = 4096
_LINK_PROGRAMS = 4
_RECEIPT_SPACING = 2  # 16 bytes, so that all are aligned alike


class Policy(enum.Enum):
    """What becomes of a value for which there may be no room on the device.

    Where the first choice is not to be had, the next is taken: wait, spill, keep.
    """

    #: Pages in host memory are taken for it: room as long as both tiers together have some.
    SPILL = "spill"
    #: Its original stays where it is this once, or goes to the next handler.
    KEEP = "keep"
    #: The host waits until the device has said how much is really in use.
    WAIT = "wait"


class Account:
    """What one stash may hold, in pages: its worst case until its receipt has arrived.

    ``is_on_device`` says that there was room on the device for all of it.
    """

    __slots__ = (
        "at_most_device",
        "at_most_total",
        "event",
        "is_on_device",
        "is_open",
        "receipt",
        "worst",
    )

    def __init__(self, worst: int, receipt: int, *, is_on_device: bool) -> None:
        self.worst = worst
        self.at_most_device = worst
        self.at_most_total = worst
        self.receipt = receipt
        self.event = None
        self.is_open = True
        self.is_on_device = is_on_device

    @property
    def programs(self) -> int | None:
        """How many programs may copy it at most; None for as many as are fastest.

        Over the link to host memory a few are as fast as all, and leave the others to matmuls.
        """
        return None if self.is_on_device else _LINK_PROGRAMS


class Ledger:
    """The host's upper bound of the pages in use."""

    def __init__(self, device_pages: int, host_pages: int, *, pinned: bool) -> None:
        self.device_pages = device_pages
        self.host_pages = host_pages
        self.receipts = torch.full(
            (_RECEIPTS, _RECEIPT_SPACING),
            RECEIPT_PENDING,
            dtype=torch.int64,
            device="cpu",
            pin_memory=pinned,
        )
        self._arrivals = self.receipts.numpy()
        self._places: dict[int, Tensor] = {}
        # The first is written by launches that nobody watches.
        self._unused = list(range(_RECEIPTS - 1, 0, -1))
        self._under_way: collections.deque[Account] = collections.deque()
        self._device_bound = 0
        self._total_bound = 0
        #: Sums over all receipts, to learn how far real use stays below the worst case.
        self.pages_arrived = 0
        self.worst_arrived = 0

    @property
    def bound(self) -> int:
        """Pages that are in use at most."""
        return self._total_bound

    def room(self, worst: int, *, spilling: bool = False) -> bool:
        """Is there room for a stash of ``worst`` pages, on the device or, spilling, anywhere?"""
        if not self._unused:
            return False
        if spilling:
            return self._total_bound + worst <= self.device_pages + self.host_pages
        return self._device_bound + worst <= self.device_pages

    def open(self, worst: int) -> Account:
        """Count a stash of at most ``worst`` pages from now on."""
        is_on_device = self.room(worst)
        account = Account(worst, self._unused.pop(), is_on_device=is_on_device)
        self._device_bound += account.at_most_device
        self._total_bound += account.at_most_total
        return account

    def launched(self, account: Account, event: object) -> None:
        """The stash is under way; its receipt will arrive, behind ``event``."""
        account.event = event  # pyright: ignore[reportAttributeAccessIssue]
        self._under_way.append(account)

    def close(self, account: Account, *, launched: bool) -> None:
        """The pages are given back, in order: whatever is launched now finds them free."""
        account.is_open = False
        self._device_bound -= account.at_most_device
        self._total_bound -= account.at_most_total
        if not launched:
            self._unused.append(account.receipt)

    def receipt_of(self, account: Account | None) -> Tensor:
        """Where the launch writes what it took."""
        number = 0 if account is None else account.receipt
        place = self._places.get(number)
        if place is None:
            place = self._places[number] = self.receipts[number, :1]
        return place

    def poll(self) -> None:
        """Look which receipts have arrived; they do so in the order of the launches.

        Raises:
            BackstashError: A stash that was admitted found no room.
        """
        while self._under_way:
            account = self._under_way[0]
            receipt = int(self._arrivals[account.receipt, 0])
            if receipt == RECEIPT_PENDING:
                return
            self._under_way.popleft()
            self._arrivals[account.receipt, 0] = RECEIPT_PENDING
            self._unused.append(account.receipt)
            if receipt == RECEIPT_OVERFLOW:
                raise BackstashError(
                    f"a stash admitted with at most {account.worst} pages found none in a pool of "
                    f"{self.device_pages} + {self.host_pages}; its gradients are not to be used"
                )
            self._settle(account, receipt)

    def wait(self, host_wait: Callable[[object], None], worst: int) -> bool:
        """Wait for receipts, oldest first, until there is room on the device; is there?"""
        while not (fits := self.room(worst)) and self._under_way:
            host_wait(self._under_way[0].event)
            before = len(self._under_way)
            self.poll()
            if len(self._under_way) == before:
                break
        return fits

    def _settle(self, account: Account, receipt: int) -> None:
        device = receipt & ((1 << RECEIPT_HOST_SHIFT) - 1)
        total = device + (receipt >> RECEIPT_HOST_SHIFT)
        self.pages_arrived += total
        self.worst_arrived += account.worst
        if account.is_open:
            self._device_bound -= account.at_most_device - device
            self._total_bound -= account.at_most_total - total
            account.at_most_device, account.at_most_total = device, total
