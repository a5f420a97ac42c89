"""Page copies that are put on a list, for matmul kernels to make while they compute.

A launch that copies buffers into pages, or back, may leave the whole pages of large buffers as a
list of *moves*.  The list is a work queue: a kernel takes a ticket, an atomic counter, and makes
the move with that number.  The grouped matmuls launched inside :func:`carrying` do so beside
their own work, and :func:`finish_moves` makes what is left.  The result is the same whoever makes
a move.  A CPU runs one thing at a time, so there every copy is made at once and nothing is left.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from backstash.errors import LayoutError


class Moves(NamedTuple):
    """A list of moves, and what its addresses are counted from.

    ``list_N`` is int64: tickets taken, tickets in all, and for each page where from and where
    to, in units of 16 bytes from the beginning of ``words``, which are the device's pages as int32.
    """

    list_N: Tensor
    words: Tensor
    page_bytes: int


MOVES_HEADER = 2


class _Carried(threading.local):
    moves: Moves | None = None


_carried = _Carried()


@contextlib.contextmanager
def carrying(moves: Moves | None) -> Iterator[None]:
    """Let the grouped matmuls that this thread launches inside make moves while they compute."""
    before, _carried.moves = _carried.moves, moves
    try:
        yield
    finally:
        _carried.moves = before


def carried() -> Moves | None:
    """The moves that a matmul launched now may make."""
    return _carried.moves


def new_moves(pages: int, device_pages: Tensor, page_bytes: int) -> Moves:
    """A list of at most so many pages that nobody has written yet."""
    list_N = torch.empty(MOVES_HEADER + 2 * pages, dtype=torch.int64, device=device_pages.device)
    return Moves(list_N, device_pages.view(torch.int32), page_bytes)


def finish_moves(moves: Moves) -> None:
    """Make the moves that nobody has made yet.

    Raises:
        LayoutError: There are some, which a CPU never leaves.
    """
    taken, count = moves.list_N[:MOVES_HEADER].tolist()
    if taken < count:
        raise LayoutError(
            f"a list on a CPU has {count - taken} moves left, but nothing is left there; stash "
            "and restore on the device that finishes"
        )
