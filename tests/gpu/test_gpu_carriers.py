"""Whole pages that a launch leaves are moved by matmuls and by a launch that finishes, exactly."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from backstash import kernels
from backstash.kernels import Moves, PoolState
from backstash.stash import PagePool
from backstash.stash.launch import Buffer, Launch
from pages_cases import Held, Pool, check_restored, gpu_pool, random_bytes

pytestmark = pytest.mark.gpu

GPU = "cuda"
WIDTHS, CAPACITIES, ROWS = [1024, 1024, 4096, 4], [8192, 1100, 2048, 8192], [5000, 16, 1201, 8192]


def product(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Both kinds of matmul: of rows, and of weights."""
    y = kernels.grouped_mm(x, w, ends)
    return kernels.grouped_mm_dw(y, x, ends)


def operands() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(65536, 512, device=GPU, dtype=torch.bfloat16)
    w = torch.randn(4, 768, 512, device=GPU, dtype=torch.bfloat16)
    return x, w, torch.tensor([9000, 9000, 40000, 65000], device=GPU)


def left(moves: Moves) -> int:
    """How many tickets nobody has taken yet."""
    taken, count = moves.list_N[:2].tolist()
    return max(0, count - taken)


class Leaving(Pool):
    """A pool whose launches leave moves; ``matmuls`` of them run before they are finished."""

    matmuls = 0

    def make(self, moves: Moves) -> None:
        x, w, ends = operands()
        alone = product(x, w, ends)
        for _ in range(self.matmuls):
            before = left(moves)
            with kernels.carrying(moves):
                beside = product(x, w, ends)
            assert left(moves) < before or before == 0
            assert torch.equal(beside, alone)
        kernels.finish_moves(moves)
        assert left(moves) == 0

    def leaving(self, held: Held) -> Moves:
        slots = len(held.table)
        return kernels.new_moves(slots, self.device_pages, self.page_bytes)


def leaving(device_pages: int, host_pages: int, page: int, matmuls: int) -> Leaving:
    pool = gpu_pool(device_pages, host_pages, page)
    pool.__class__ = Leaving
    assert isinstance(pool, Leaving)
    pool.matmuls = matmuls
    return pool


def through(pool: Leaving, rows: list[int]) -> None:
    """Into pages and back, both ways left to others."""
    sources = [random_bytes(w * c, w, GPU) for w, c in zip(WIDTHS, CAPACITIES, strict=True)]
    counts = [torch.tensor([count], device=GPU) for count in rows]
    plain = pool.stash(sources, counts, WIDTHS)
    pool.release(plain)
    pool.device_pages.fill_(0xEE)
    moves = pool.leaving(plain)
    table = torch.empty_like(plain.table)
    pool.kernels.stash_pages(
        sources,
        counts,
        WIDTHS,
        table,
        pool.device_pages,
        pool.host_pages,
        pool.free_N,
        pool.state,
        pool.receipt,
        page_bytes=pool.page_bytes,
        number=0,
        moves=moves,
    )
    pool.make(moves)
    held = Held(sources, plain.lengths, table)
    check_restored(held, pool.restore(held))
    buffers = [torch.full_like(source, 0xAB) for source in sources]
    moves = pool.leaving(plain)
    pool.kernels.restore_pages(
        buffers,
        [0, 1, 2, 3],
        table,
        pool.device_pages,
        pool.host_pages,
        pool.state,
        buffers=4,
        page_bytes=pool.page_bytes,
        moves=moves,
    )
    pool.make(moves)
    check_restored(held, buffers)


@pytest.mark.parametrize("matmuls", [0, 1, 3])
@pytest.mark.parametrize("tiers", [(2000, 0), (200, 2000), (0, 2000)], ids=str)
@pytest.mark.parametrize("page", [4096, 16384, 65536, 131072])
def test_what_is_left_arrives_whoever_moves_it(
    page: int, tiers: tuple[int, int], matmuls: int
) -> None:
    through(leaving(*(tiers if page > 4096 else (20000, 0)), page, matmuls), ROWS)


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65])
def test_nothing_and_little_is_moved_as_well(rows: int) -> None:
    through(leaving(2000, 0, 65536, 1), [rows] * 4)


def test_without_room_nothing_is_left_and_zeros_come_back() -> None:
    pool = leaving(3, 0, 65536, 1)
    source = random_bytes(2**21, 0, GPU)
    table = torch.empty(kernels.table_length(1, 32), dtype=torch.int64, device=GPU)
    moves = kernels.new_moves(32, pool.device_pages, pool.page_bytes)
    pages = (pool.device_pages, pool.host_pages)
    pool.kernels.stash_pages(
        [source],
        [torch.tensor([2**21], device=GPU)],
        [1],
        table,
        *pages,
        pool.free_N,
        pool.state,
        pool.receipt,
        page_bytes=pool.page_bytes,
        number=0,
        moves=moves,
    )
    assert pool.counter(PoolState.OVERFLOWS) == 1
    assert left(moves) == 0
    buffer = torch.full_like(source, 0xAB)
    pool.kernels.restore_pages(
        [buffer],
        [0],
        table,
        *pages,
        pool.state,
        buffers=1,
        page_bytes=pool.page_bytes,
        moves=moves,
    )
    pool.make(moves)
    assert not buffer.any()


def test_the_list_of_moves_is_written_behind_what_fills_its_memory() -> None:
    """Deterministic mode fills fresh memory on the stream that computes, which may be behind."""
    pool = PagePool(16 * 2**20, device=GPU, page_bytes=65536)
    source = random_bytes(2**22, 0, GPU)
    tickets = len(source) // importlib.import_module("backstash.kernels.moves").TICKET_BYTES

    def leave(cycles: int) -> Launch:
        complete = pool.streams.event()
        torch.cuda._sleep(cycles)
        with pool.turn():
            buffer = Buffer(source, pool.one_row, len(source))
            return pool.stash([buffer], None, 0, after=complete, leaving=True)

    # The first one compiles, and that takes longer than anything waits.
    for cycles in (1, 10**8):
        launch = leave(cycles)
        torch.cuda.synchronize()
        assert launch.moves is not None
        assert launch.moves.list_N[:2].tolist() == [0, tickets]
        pool.drop(launch)
