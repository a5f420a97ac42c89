"""What is left of a list of moves, made by a launch of its own."""

# The type checker knows neither launch options nor loops that Triton unrolls.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from backstash.device import processor_count
from backstash.kernels.launches import Launcher
from backstash.kernels.reference import moves as reference
from backstash.kernels.reference.moves import Moves

HEADER = tl.constexpr(reference.MOVES_HEADER)
#: Bytes that a ticket stands for; a page is whole tickets.
TICKET_BYTES = 16384
TICKET = tl.constexpr(TICKET_BYTES)
_LEAST_BYTES = 1 << 20
_PROGRAMS = 4


def is_left(dtype: torch.dtype, count: int, page_bytes: int, *, is_aligned: bool) -> bool:
    """Are whole pages of a buffer left as moves: is it bytes, large, at a vector's address?"""
    is_large = dtype is torch.uint8 and count >= _LEAST_BYTES
    return is_large and is_aligned and page_bytes % TICKET_BYTES == 0


@triton.jit
def page_of(p_buffer, i_page, PAGE: tl.constexpr):
    """Where the bytes of some pages begin in a buffer."""
    return p_buffer + i_page.to(tl.int64) * PAGE


@triton.jit
def write_moves(p_moves, i_move, p_froms, p_tos, p_base):
    """Write down moves of whole pages, in vectors from the base."""
    base = p_base.to(tl.int64)
    p_entry = p_moves + HEADER + i_move * 2
    tl.store(p_entry, (p_froms.to(tl.int64) - base) // 16)
    tl.store(p_entry + 1, (p_tos.to(tl.int64) - base) // 16)


@triton.jit
def begin_moves(p_moves, count, PAGE: tl.constexpr):
    """Say how many tickets the moves are, and that none is taken."""
    if p_moves is not None and tl.program_id(0) == 0:
        tl.store(p_moves, 0)
        tl.store(p_moves + 1, count * (PAGE // TICKET))


@triton.jit
def _finish_kernel(p_moves, p_base, PARTS: tl.constexpr, WORDS: tl.constexpr):
    i_word = tl.arange(0, WORDS)
    count = tl.load(p_moves + 1)
    ticket = tl.atomic_add(p_moves, 1, sem="relaxed")
    while ticket < count:
        p_entry = p_moves + HEADER + ticket // PARTS * 2
        o_part = ticket % PARTS * (WORDS // 4)
        p_from = p_base + (tl.load(p_entry) + o_part) * 4
        p_to = p_base + (tl.load(p_entry + 1) + o_part) * 4
        word = tl.load(p_from + i_word)
        ticket = tl.atomic_add(p_moves, 1, sem="relaxed")
        tl.store(p_to + i_word, word)


def finish_moves(moves: Moves) -> None:
    """Make the moves that nobody has made yet."""
    device = moves.list_N.device
    _launch_finish(
        processor_count(device) * _PROGRAMS,
        moves.list_N,
        moves.words,
        PARTS=moves.page_bytes // TICKET_BYTES,
        WORDS=TICKET_BYTES // 4,
        num_warps=8,
    )


_launch_finish = Launcher(_finish_kernel)
