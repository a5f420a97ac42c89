"""The free list inside kernels: rings of any size, and counters that have grown for long."""

from __future__ import annotations

import pytest
import torch

from backstash.kernels import PoolState
from backstash.kernels.reference import pages as reference
from pages_cases import Pool, check_restored, gpu_pool, random_bytes

pytestmark = pytest.mark.gpu

PAGE = 256


@pytest.mark.parametrize("sizes", [(1, 0), (0, 1), (7, 3), (40, 0), (0, 40)], ids=str)
@pytest.mark.parametrize("grown", [0, 2**31 - 3, 2**31 + 5, 2**40 + 7])
def test_a_ring_is_followed_however_far_its_counters_have_grown(
    sizes: tuple[int, int], grown: int
) -> None:
    pools = [Pool(*sizes, PAGE, reference), gpu_pool(*sizes, PAGE)]
    found = []
    for pool in pools:
        for place in PoolState:
            if place <= PoolState.TAIL_HOST:
                pool.state[place] += grown
        device = str(pool.device)
        for turn in range(9):
            count = PAGE * (1 + turn % sum(sizes)) - 5
            rows = torch.tensor([count], device=device)
            held = pool.stash([random_bytes(count + 9, turn, device)], [rows], [1])
            check_restored(held, pool.restore(held))
            pool.release(held)
        found.append((pool.state.cpu(), pool.free_N.cpu(), held.table.cpu()))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("together", [1, 2, 7, reference.MOST_RELEASED])
def test_launches_given_back_together_leave_the_rings_of_the_reference(together: int) -> None:
    pools = [Pool(3000, 50, PAGE, reference), gpu_pool(3000, 50, PAGE)]
    for pool in pools:
        device = str(pool.device)
        rows = torch.tensor([10**9], device=device)
        held = []
        # The fourth is larger than a block of the kernel, and some of it lies on the host.
        for i, pages in enumerate([1, 9, 0, 2990, 17, 99, 20, 3]):
            sources = [random_bytes(pages * PAGE - 1 if pages else 0, i, device)]
            sources += [random_bytes(5, i, device)] * (i % 3)
            held.append(pool.stash(sources, [rows] * len(sources), [1] * len(sources)))
        pool.release_all(held[:together])
    assert pools[0].free_pages() == pools[1].free_pages()
    assert torch.equal(pools[0].state, pools[1].state.cpu())


def test_a_launch_without_room_moves_no_head_and_counts_what_it_lacked() -> None:
    pool = gpu_pool(3, 1, PAGE)
    heads = pool.state[: PoolState.TAIL_HOST + 1].clone()
    rows = torch.tensor([10 * PAGE], device="cuda")
    held = pool.stash([random_bytes(10 * PAGE, 0, "cuda")], [rows], [1])
    assert torch.equal(pool.state[: PoolState.TAIL_HOST + 1], heads)
    assert pool.counter(PoolState.SHORTAGE) == 6
    assert pool.counter(PoolState.MISSING) == pool.counter(PoolState.DEMAND) == 10
    pool.release(held)
    assert pool.counter(PoolState.MISSING) == 0
