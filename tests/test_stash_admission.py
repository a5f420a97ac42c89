"""The host admits only what must fit, though what it knows of the device is old."""

from __future__ import annotations

import pytest
import torch

import backstash as bs
from backstash.errors import BackstashError
from backstash.kernels import RECEIPT_HOST_SHIFT, RECEIPT_OVERFLOW
from backstash.stash import PagePool, Policy, Stash, Statistics
from backstash.stash.admission import Account, Ledger
from stash_cases import CAPACITY, PAGE, WIDTH, assert_nothing_is_held, scale


def ledger(device: int = 10, host: int = 0) -> Ledger:
    return Ledger(device, host, pinned=False)


def launched(ledger: Ledger, worst: int) -> Account:
    account = ledger.open(worst)
    ledger.launched(account, None)
    return account


def arrive(ledger: Ledger, account: Account, device: int, host: int = 0) -> None:
    ledger.receipt_of(account).fill_(device + (host << RECEIPT_HOST_SHIFT))
    ledger.poll()


def test_until_its_receipt_arrives_a_stash_counts_with_its_worst_case() -> None:
    book = ledger()
    account = launched(book, 8)
    book.poll()
    assert (book.bound, book.room(2), book.room(3)) == (8, True, False)
    arrive(book, account, 3)
    assert (book.bound, book.room(7), book.room(8)) == (3, True, False)
    book.close(account, launched=True)
    assert book.bound == 0


def test_receipts_are_taken_in_the_order_of_the_launches() -> None:
    book = ledger()
    first, second = launched(book, 4), launched(book, 4)
    arrive(book, second, 1)
    assert book.bound == 8
    arrive(book, first, 2)
    assert book.bound == 3


def test_what_is_given_back_before_its_receipt_arrives_is_not_counted_twice() -> None:
    book = ledger()
    account = launched(book, 4)
    book.close(account, launched=True)
    assert book.bound == 0
    arrive(book, account, 2)
    assert book.bound == 0
    assert (book.pages_arrived, book.worst_arrived) == (2, 4)


def test_spilling_counts_both_tiers_and_not_spilling_one() -> None:
    book = ledger(10, 10)
    account = launched(book, 8)
    assert not book.room(8)
    assert book.room(8, spilling=True)
    assert not book.room(13, spilling=True)
    arrive(book, account, 2, host=3)
    assert (book.bound, book.room(8), book.room(9)) == (5, True, False)


def test_waiting_stops_as_soon_as_there_is_room() -> None:
    book = ledger()
    accounts = [launched(book, 3), launched(book, 3), launched(book, 3)]
    waited = []

    def host_wait(event: object) -> None:
        account = accounts[len(waited)]
        waited.append(account)
        book.receipt_of(account).fill_(1)

    assert book.wait(host_wait, 5)
    assert len(waited) == 2
    assert book.bound == 1 + 1 + 3
    assert not book.wait(host_wait, 9)
    assert len(waited) == 3


def test_more_stashes_under_way_than_receipts_are_refused_not_mixed_up() -> None:
    book = ledger(1_000_000)
    while book.room(1):
        account = launched(book, 1)
    assert book.bound == 4095
    arrive(book, account, 1)
    assert not book.room(1)  # the oldest ones are still under way


def test_an_admitted_stash_without_room_is_an_error_and_never_silence() -> None:
    book = ledger()
    account = launched(book, 4)
    book.receipt_of(account).fill_(RECEIPT_OVERFLOW)
    with pytest.raises(BackstashError, match="at most 4 pages found none in a pool of 10"):
        book.poll()


class LateLedger(Ledger):
    """Looks at no receipt until it is told to wait."""

    late = True

    def poll(self) -> None:
        if not self.late:
            super().poll()


@pytest.fixture
def late_pool(monkeypatch: pytest.MonkeyPatch) -> PagePool:
    """A pool whose counters arrive late: 24 pages are a buffer's worst case, 4 what it needs."""
    monkeypatch.setattr("backstash.stash.memory.Ledger", LateLedger)
    pool = PagePool(60 * PAGE, 60 * PAGE, device="cpu", page_bytes=PAGE)

    def host_wait(event: object) -> None:
        LateLedger.late = False

    monkeypatch.setattr(pool.streams, "host_wait", host_wait)
    monkeypatch.setattr(LateLedger, "late", True)
    return pool


EXPECTED = {
    Policy.SPILL: {"batches": 5, "kept": 1, "waits": 0},
    Policy.KEEP: {"batches": 2, "kept": 4, "waits": 0},
    Policy.WAIT: {"batches": 6, "kept": 0, "waits": 1},
}


@pytest.mark.parametrize("policy", Policy, ids=lambda policy: policy.value)
def test_with_late_counters_each_policy_does_what_it_says(
    policy: Policy, late_pool: PagePool
) -> None:
    stash = Stash(late_pool, policy=policy)
    x = torch.randn(CAPACITY, WIDTH, requires_grad=True)
    with bs.saving(stash):
        y = x
        for _ in range(6):
            y = scale(y, 8, 1.0)
    counts = {name: getattr(late_pool_stats(stash), name) for name in EXPECTED[policy]}
    assert counts == EXPECTED[policy]
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad[8:], torch.ones(CAPACITY - 8, WIDTH))
    torch.testing.assert_close(x.grad[:8], 1 + 6 * x.detach()[:8], rtol=0, atol=1e-5)
    del y
    assert_nothing_is_held(stash)


def late_pool_stats(stash: Stash) -> Statistics:
    """The statistics, of which reading the counters must not look like waiting."""
    late = LateLedger.late
    statistics = stash.stats()
    LateLedger.late = late
    return statistics


def test_the_share_that_is_really_used_is_learnt_from_receipts() -> None:
    pool = PagePool(100 * PAGE, device="cpu", page_bytes=PAGE)
    stash = Stash(pool)
    with bs.saving(stash):
        y = scale(torch.randn(CAPACITY, WIDTH, requires_grad=True), CAPACITY // 2)
    stash.settle()
    pool.memory.ledger.poll()
    assert pool.memory.ledger.pages_arrived * 2 == pool.memory.ledger.worst_arrived
    del y
