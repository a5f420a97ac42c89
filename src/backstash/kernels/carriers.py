"""Moves made beside a matmul for Hopper: one warp more in each of its programs.

A matmul computes more than it reads and writes.  Its programs take whole processors, though, so
that no other kernel finds room beside them: the copy has to be part of them.  The warp takes a
ticket, moves what it stands for, and goes on until there are no more, or until all tiles of the
matmul are given out: it never makes a matmul last longer than the move that it is at.
"""

# Gluon's annotations do not say what its compiler takes.
# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from backstash.kernels.moves import TICKET_BYTES
from backstash.kernels.reference import moves as reference
from backstash.kernels.reference.moves import carried

HEADER = gl.constexpr(reference.MOVES_HEADER)
UNITS = gl.constexpr(TICKET_BYTES // 16)
# Words that the warp has under way at once, sixteen vectors a thread.
_WORDS = gl.constexpr(2048)
_STEPS = gl.constexpr(TICKET_BYTES // 4 // 2048)
#: Registers of a thread: of the second warpgroup, of the warp that fetches, of the one that moves.
REGISTERS = gl.constexpr([208, 88, 88])


@gluon.jit
def _take(p_moves, p_given, tiles, count):
    """The next ticket; past the last one where the matmul has given out all of its tiles."""
    is_busy = gl.load(p_given, volatile=True) < tiles
    ticket = gl.atomic_add(p_moves, 1, mask=is_busy, sem="relaxed")
    return gl.where(is_busy, ticket, count)


@gluon.jit
def carry(p_moves, p_base, p_given, tiles, PARTS: gl.constexpr):
    """Make moves while ``tiles`` tiles are given out; ``PARTS`` tickets stand for a page."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    i_word = gl.arange(0, _WORDS, layout=layout)
    count = gl.load(p_moves + 1)
    ticket = _take(p_moves, p_given, tiles, count)
    while ticket < count:
        p_entry = p_moves + HEADER + ticket // PARTS * 2
        o_part = ticket % PARTS * UNITS
        p_from = p_base + (gl.load(p_entry) + o_part) * 4
        p_to = p_base + (gl.load(p_entry + 1) + o_part) * 4
        for step in gl.static_range(_STEPS):
            word = gl.load(p_from + step * _WORDS + i_word, cache_modifier=".cg")
            if step == 0:
                ticket = _take(p_moves, p_given, tiles, count)
            gl.store(p_to + step * _WORDS + i_word, word)


def carried_by(*, is_plain: bool) -> tuple[Tensor | None, Tensor | None, int]:
    """The moves that a matmul is to make, what they are counted from, and tickets of a page.

    Only matmuls of plain values have registers for it.
    """
    moves = carried() if is_plain else None
    if moves is None:
        return None, None, 0
    return moves.list_N, moves.words, moves.page_bytes // TICKET_BYTES
