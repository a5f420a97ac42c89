"""The pool without autograd: sizes, growth, and what it gives back to whom."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import backstash as bs
from backstash.errors import ConfigError, DeviceError
from backstash.kernels import PoolState
from backstash.stash import PagePool, Policy, Sizing, Stash
from backstash.stash.launch import Buffer, Launch
from stash_cases import CAPACITY, WIDTH, assert_nothing_is_held, pool, scale

PAGE = 64


def launch(memory: PagePool, nbytes: int, rows: int, number: int = 0) -> Launch:
    data = torch.arange(nbytes).to(torch.uint8)
    with memory.turn():
        account, _ = memory.admit(memory.pages_of([(nbytes, torch.uint8)]), Policy.SPILL)
        assert account is not None
        return memory.stash([Buffer(data, torch.tensor([rows]), 1)], account, number)


def test_what_is_stashed_comes_back_until_it_is_dropped() -> None:
    memory = pool(10, page_bytes=PAGE)
    held = launch(memory, 300, 130)
    buffer = torch.zeros(300, dtype=torch.uint8)
    with memory.turn():
        memory.restore(held, [buffer], [0])
    assert torch.equal(buffer[:130], torch.arange(130).to(torch.uint8))
    assert not memory.is_empty()
    memory.drop(held)
    assert_nothing_is_held(memory)


def test_a_drop_while_the_pool_is_busy_is_done_by_whoever_is_using_it() -> None:
    memory = pool(10, page_bytes=PAGE)
    held = launch(memory, 300, 130)
    with memory.turn():
        memory.drop(held)
        assert not memory.is_empty()
    assert_nothing_is_held(memory)


BAD = {
    "no power of two": ({"page_bytes": 48}, "power of two from 16"),
    "smaller than a vector": ({"page_bytes": 8}, "power of two from 16"),
    "negative": ({"capacity_bytes": -1}, "capacity_bytes must be .* at least 0, got -1"),
    "negative on the host": ({"host_bytes": -1}, "host_bytes must be .* at least 0, got -1"),
    "a float": ({"capacity_bytes": 1e9}, "capacity_bytes must be a whole number"),
    "words": ({"host_bytes": "4GB"}, "host_bytes must be a whole number of at least 0, got '4GB'"),
    "pages of half a byte": ({"page_bytes": 4096.5}, "page_bytes must be a whole number"),
    "sizing by a number": ({"sizing": 1.2}, r"sizing must be of Sizing, got 1.2; make one with"),
    "too many pages": ({"capacity_bytes": 2**40, "page_bytes": 16}, "make page_bytes larger"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
def test_sizes_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PagePool(**({"capacity_bytes": 0, "device": "cpu"} | options))  # pyright: ignore


def test_a_device_without_kernels_is_refused() -> None:
    with pytest.raises(DeviceError, match="CPU or a CUDA GPU, got meta"):
        PagePool(0, device="meta")


def test_a_pool_of_no_bytes_takes_nothing_and_breaks_nothing() -> None:
    stash = Stash(PagePool(0, device="cpu", page_bytes=PAGE))
    x = torch.randn(CAPACITY, WIDTH, requires_grad=True)
    with bs.saving(stash):
        loss = scale(x, 3).sum()
    loss.backward()
    assert (stash.stats().batches, stash.stats().kept, stash.stats().fill) == (0, 1, 0.0)


def test_a_pool_grows_only_while_nothing_is_in_use() -> None:
    memory = pool(10, page_bytes=PAGE)
    held = launch(memory, 300, 130)
    with pytest.raises(ConfigError, match="grow only while no page is in use, but up to 5 are"):
        memory.grow(100 * PAGE)
    memory.drop(held)
    assert memory.grow(100 * PAGE)
    assert not memory.grow(50 * PAGE)
    assert (memory.device_size, memory.growths) == (100, 1)
    assert_nothing_is_held(memory)


def rounds(stash: Stash, valid: list[int]) -> None:
    for rows in valid:
        x = torch.randn(CAPACITY, WIDTH, requires_grad=True)
        with bs.saving(stash):
            loss = scale(scale(x, rows), rows).sum()
        loss.backward()


def automatic(**options: float) -> Stash:
    sizing = Sizing(**options)  # pyright: ignore[reportArgumentType]
    return Stash(PagePool.auto(device="cpu", page_bytes=PAGE, sizing=sizing))


def test_an_automatic_pool_follows_what_is_needed() -> None:
    stash = automatic(margin=2.0)
    rounds(stash, [8] * 5)
    # Two buffers of 8 rows of 128 bytes are 32 pages; both worst cases are admitted at once.
    statistics = stash.stats()
    assert statistics.device_pages >= 64
    assert statistics.growths > 0
    before = statistics.kept
    rounds(stash, [8] * 5)
    assert stash.stats().device_pages == statistics.device_pages
    assert stash.stats().kept == before or statistics.device_pages < 192


def test_an_automatic_pool_starts_from_its_estimate_and_keeps_nothing_back() -> None:
    stash = Stash(PagePool.auto(estimate_bytes=192 * PAGE, device="cpu", page_bytes=PAGE))
    assert stash.pool.device_size == 212  # with a margin of a tenth
    rounds(stash, [CAPACITY] * 3)
    assert stash.stats().kept == 0


def test_an_automatic_pool_never_grows_beyond_its_limit() -> None:
    stash = automatic(margin=4.0, most_bytes=20 * PAGE)
    rounds(stash, [CAPACITY] * 4)
    assert stash.pool.device_size <= 20
    assert not stash.pool.grow(1000 * PAGE)


def test_an_automatic_pool_forgets_a_burst_in_time() -> None:
    stash = automatic(decay=0.5)
    rounds(stash, [CAPACITY] * 3)
    large = stash.pool.device_size
    rounds(stash, [1] * 12)
    assert stash.pool.device_size <= large // 2
    assert_nothing_is_held(stash)


def test_a_pool_whose_addresses_a_graph_holds_stays_as_it_is() -> None:
    stash = automatic()
    stash.pool.is_fixed = True
    rounds(stash, [CAPACITY] * 3)
    assert stash.pool.device_size == 0


def test_a_pool_that_cannot_get_more_memory_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = pool(10, page_bytes=PAGE)
    allocate = memory._allocate

    def scarce(device_size: int, host_size: int) -> object:
        if device_size > 10:
            raise torch.OutOfMemoryError("no")
        return allocate(device_size, host_size)

    monkeypatch.setattr(memory, "_allocate", scarce)
    assert not memory.grow(100 * PAGE)
    assert (memory.device_size, memory.growths) == (10, 0)


def test_a_flag_is_raised_where_nobody_watches_and_can_be_cleared() -> None:
    memory = pool(2, page_bytes=PAGE)
    data = torch.ones(300, dtype=torch.uint8)
    with memory.turn():
        held = memory.stash([Buffer(data, torch.tensor([300]), 1)], None, 7)
    counters = memory.counters()
    assert (counters[PoolState.OVERFLOWS], counters[PoolState.SHORTAGE]) == (1, 3)
    assert counters[PoolState.FIRST_OVERFLOW] == 8
    assert counters[PoolState.DEMAND] == 5
    memory.clear_overflow()
    assert memory.counters()[PoolState.OVERFLOWS] == 0
    memory.drop(held)
    assert_nothing_is_held(memory)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_stash_is_not_copied_with_a_model_that_holds_it(make: Callable[[Any], Any]) -> None:
    model: Any = torch.nn.Linear(2, 2)
    model.stash = Stash(PagePool(1 << 12, device="cpu", page_bytes=64))
    given = model.stash.pool if make is copy.copy else model
    with pytest.raises(ConfigError, match=r"neither copied nor pickled.*make another pool"):
        make(given)
