"""Lists of moves: who is given one, and that nothing is left on a CPU."""

from __future__ import annotations

import threading

import pytest
import torch

from backstash import kernels
from backstash.errors import LayoutError
from backstash.kernels.reference.moves import carried
from pages_cases import Pool, random_bytes

PAGE = 16384


def test_a_matmul_is_given_moves_inside_the_context_alone() -> None:
    outer = kernels.new_moves(1, torch.empty(PAGE, dtype=torch.uint8), PAGE)
    inner = kernels.new_moves(2, torch.empty(PAGE, dtype=torch.uint8), PAGE)
    assert carried() is None
    with kernels.carrying(outer):
        with kernels.carrying(inner):
            assert carried() is inner
        with kernels.carrying(None):
            assert carried() is None
        assert carried() is outer
        with pytest.raises(OSError, match="x"), kernels.carrying(inner):
            raise OSError("x")
        assert carried() is outer
    assert carried() is None


def test_another_thread_is_not_given_them() -> None:
    moves = kernels.new_moves(1, torch.empty(PAGE, dtype=torch.uint8), PAGE)
    seen: list[object] = [moves]
    with kernels.carrying(moves):
        thread = threading.Thread(target=lambda: seen.append(carried()))
        thread.start()
        thread.join()
    assert seen == [moves, None]


def test_a_cpu_leaves_nothing() -> None:
    pool = Pool(80, 0, PAGE)
    source, count = random_bytes(64 * PAGE, 0), torch.tensor([64 * PAGE - 5])
    table = torch.empty(kernels.table_length(1, 64), dtype=torch.int64)
    moves = kernels.new_moves(64, pool.device_pages, PAGE)
    tiers = pool.device_pages, pool.host_pages
    kernels.stash_pages(
        [source],
        [count],
        [1],
        table,
        *tiers,
        pool.free_N,
        pool.state,
        pool.receipt,
        page_bytes=PAGE,
        number=0,
        moves=moves,
    )
    kernels.finish_moves(moves)
    buffer = torch.full_like(source, 0xAB)
    kernels.restore_pages(
        [buffer], [0], table, *tiers, pool.state, buffers=1, page_bytes=PAGE, moves=moves
    )
    kernels.finish_moves(moves)
    assert torch.equal(buffer[: 64 * PAGE - 5], source[: 64 * PAGE - 5])
    assert (buffer[64 * PAGE - 5 :] == 0xAB).all()


def test_moves_that_are_left_on_a_cpu_are_an_error() -> None:
    moves = kernels.new_moves(3, torch.empty(PAGE, dtype=torch.uint8), PAGE)
    moves.list_N[:2] = torch.tensor([1, 3])
    with pytest.raises(LayoutError, match="2 moves left"):
        kernels.finish_moves(moves)
