"""Bytes go into pages and come back, and the free list says the truth at every moment.

The same programs run on the Triton twins on a GPU, and here in Triton's interpreter where the
package is installed.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

from backstash.kernels.reference import pages as reference
from backstash.kernels.reference.pages import PoolState
from interpreter import interpreted, run_interpreted
from pages_cases import Pool, check_restored, random_bytes, random_program

PAGE = 64


@pytest.fixture(
    params=["reference", pytest.param("interpreted", marks=interpreted)], scope="module"
)
def kernels(request: pytest.FixtureRequest) -> ModuleType:
    """The twin in PyTorch, and the one in Triton as its interpreter runs it."""
    if request.param == "reference":
        return reference
    return importlib.import_module("backstash.kernels.pages")


def test_the_interpreted_twins_pass_these_tests() -> None:
    run_interpreted(__file__)


def count(rows: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([rows], dtype=dtype)


LENGTHS = {
    "none": 0,
    "one": 1,
    "a byte less than a page": PAGE - 1,
    "a page": PAGE,
    "a byte more than a page": PAGE + 1,
    "all": 5 * PAGE + 3,
    "more than all": 9 * PAGE,
    "less than none": -1,
    "absurdly many": 2**62,
}


@pytest.mark.parametrize("rows", LENGTHS.values(), ids=LENGTHS)
def test_the_valid_prefix_comes_back_and_the_tail_is_not_touched(
    kernels: ModuleType, rows: int
) -> None:
    pool = Pool(8, 0, PAGE, kernels)
    held = pool.stash([random_bytes(5 * PAGE + 3, 0)], [count(rows, torch.int64)], [1])
    check_restored(held, pool.restore(held))
    assert len(pool.pages_of(held)) == -(-held.lengths[0] // PAGE)
    assert int(pool.receipt) == len(pool.pages_of(held))


@pytest.mark.parametrize("width", [1, 3, 4, 16, 48, 200], ids="{}-byte rows".format)
def test_rows_of_any_width_move_as_bytes(kernels: ModuleType, width: int) -> None:
    pool = Pool(40, 0, PAGE, kernels)
    held = pool.stash([random_bytes(11 * width, 0)], [count(7)], [width])
    assert held.lengths == [7 * width]
    check_restored(held, pool.restore(held))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_counts_may_be_integers_of_any_width(kernels: ModuleType, dtype: torch.dtype) -> None:
    pool = Pool(8, 0, PAGE, kernels)
    held = pool.stash([random_bytes(200, 0)], [count(100, dtype)], [1])
    check_restored(held, pool.restore(held))


@pytest.mark.parametrize("shift", [0, 1, 4, 8, 16])
def test_addresses_need_no_alignment(kernels: ModuleType, shift: int) -> None:
    pool = Pool(8, 0, PAGE, kernels)
    held = pool.stash([random_bytes(shift + 250, 0)[shift:]], [count(201)], [1])
    check_restored(held, pool.restore(held))


def test_one_launch_takes_eight_buffers_and_some_come_back_alone(kernels: ModuleType) -> None:
    pool = Pool(40, 0, PAGE, kernels)
    sizes = [1, 64, 65, 0 + 8, 300, 17, 128, 63]
    rows = [1, 64, 60, 0, 299, 99, 128, 62]
    held = pool.stash(
        [random_bytes(size, i) for i, size in enumerate(sizes)], [count(r) for r in rows], [1] * 8
    )
    check_restored(held, pool.restore(held))
    check_restored(held, pool.restore(held, [4, 1]), [4, 1])
    assert sorted(pool.pages_of(held)) == list(range(len(pool.pages_of(held))))


def test_what_the_device_has_no_room_for_lies_on_the_host(kernels: ModuleType) -> None:
    pool = Pool(2, 5, PAGE, kernels)
    held = pool.stash(
        [random_bytes(3 * PAGE, 0), random_bytes(2 * PAGE - 5, 1)], [count(999)] * 2, [1, 1]
    )
    assert pool.pages_of(held) == [0, 1, 2, 3, 4]
    assert int(pool.receipt) == 2 + (3 << reference.RECEIPT_HOST_SHIFT)
    check_restored(held, pool.restore(held))
    assert pool.counter(PoolState.SPILLED) == 3
    pool.release(held)
    assert pool.free_pages() == [[0, 1], [5, 6, 2, 3, 4]]


@pytest.mark.parametrize(("device", "host"), [(4, 0), (2, 2), (0, 4), (0, 0)])
def test_without_room_nothing_is_taken_and_zeros_come_back(
    kernels: ModuleType, device: int, host: int
) -> None:
    pool = Pool(device, host, PAGE, kernels)
    first = pool.stash([random_bytes(PAGE, 0)], [count(PAGE if device + host else 0)], [1])
    free = pool.free_pages()
    held = pool.stash([random_bytes(5 * PAGE, 1), random_bytes(9, 2)], [count(999)] * 2, [1, 1])
    assert pool.free_pages() == free
    assert int(pool.receipt) == reference.RECEIPT_OVERFLOW
    for buffer, source in zip(pool.restore(held), held.sources, strict=True):
        assert (buffer[: len(source)] == 0).all()
    used = len(pool.pages_of(first))
    assert pool.counter(PoolState.OVERFLOWS) == 1
    assert pool.counter(PoolState.SHORTAGE) == 6 - (device + host - used)
    assert pool.counter(PoolState.FIRST_OVERFLOW) == 2
    assert pool.counter(PoolState.DEMAND) == used + 6
    assert pool.counter(PoolState.MISSING) == 6
    pool.release(held)
    assert pool.counter(PoolState.MISSING) == 0
    assert pool.free_pages() == free
    check_restored(first, pool.restore(first))


@pytest.mark.parametrize("together", [1, 2, 3, reference.MOST_RELEASED])
def test_launches_are_given_back_together_in_their_order(
    kernels: ModuleType, together: int
) -> None:
    pools = [Pool(9, 30, PAGE, kernels), Pool(9, 30, PAGE, reference)]
    for pool in pools:
        pool.release(pool.stash([random_bytes(4 * PAGE, 0)], [count(999)], [1]))
        held = []
        for i, length in enumerate([PAGE, 3 * PAGE - 1, 0, 2 * PAGE, 50 * PAGE, 5, 7, PAGE]):
            sources = [random_bytes(length, 1), random_bytes(9, 2)][: 1 + i % 2]
            held.append(pool.stash(sources, [count(9999)] * len(sources), [1] * len(sources)))
        pool.release_all(held[:together])
    assert pools[0].free_pages() == pools[1].free_pages()
    assert torch.equal(pools[0].state, pools[1].state)


def test_the_highest_use_is_remembered(kernels: ModuleType) -> None:
    pool = Pool(3, 3, PAGE, kernels)
    a = pool.stash([random_bytes(2 * PAGE, 0)], [count(999)], [1])
    b = pool.stash([random_bytes(2 * PAGE, 0)], [count(999)], [1])
    pool.release(a)
    pool.release(b)
    pool.release(pool.stash([random_bytes(PAGE, 0)], [count(999)], [1]))
    assert pool.counter(PoolState.HIGH_DEVICE) == 3
    assert pool.counter(PoolState.HIGH_HOST) == 1
    assert pool.counter(PoolState.DEMAND) == 4
    assert pool.counter(PoolState.BYTES_STASHED) == 5 * PAGE


@pytest.mark.parametrize("seed", range(25))
def test_every_page_is_free_or_held_once_in_any_program(kernels: ModuleType, seed: int) -> None:
    random_program(kernels, seed, 400 if kernels is reference else 8, PAGE)


def test_the_smallest_page_is_sixteen_bytes(kernels: ModuleType) -> None:
    random_program(kernels, 7, 100 if kernels is reference else 8, page=16)


def test_a_launch_of_the_twin_takes_at_most_eight_buffers() -> None:
    from backstash.errors import LayoutError
    from backstash.kernels import pages

    pool = Pool(40, 0, PAGE, pages)
    with pytest.raises(LayoutError, match="1 to 8 buffers, got 9"):
        pool.stash([random_bytes(1, 0)] * 9, [count(1)] * 9, [1] * 9)
