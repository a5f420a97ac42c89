"""What the Triton kernels over blocks of rows share: which rows a program works on.

A program gets at most B rows, and never rows of two groups.  The host does not know how many
rows a group has, so it starts ``ceil(M / B) + G`` programs, which is as many as there can be
need for.  A first, tiny launch writes a table that tells each program its group and its rows:
a search in each of thousands of programs would cost more than that launch.  The programs that
no group needs are enough to cover the tail, B rows each: with m_g rows in group g,
``sum(ceil(m_g / B)) <= (sum(m_g) + G (B - 1)) / B``.

Letters: M rows, K columns, G groups, B rows of a block, S blocks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.launches import Launcher
from backstash.kernels.sizes import next_power_of_2


@triton.jit
def group_rows(p_ends, i_group, m_group, rows):
    """The first row of each group and the row after its last.

    Cut at the buffer, so whatever the ends say, no address leaves it.
    """
    ends = tl.load(p_ends + i_group, mask=m_group, other=0)
    ends = tl.minimum(tl.maximum(ends, 0), rows).to(tl.int32)
    starts = tl.load(p_ends + i_group - 1, mask=m_group & (i_group > 0), other=0)
    starts = tl.minimum(tl.maximum(starts, 0), rows).to(tl.int32)
    return starts, ends


@triton.jit
def write_table(
    p_ends,
    p_table,
    group,
    groups,
    rows,
    blocks,
    B: tl.constexpr,
    BG: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write the entries of one group; ``group == groups`` is the tail."""
    i_group = tl.arange(0, BG)
    m_group = i_group < groups
    starts, ends = group_rows(p_ends, i_group, m_group, rows)
    counts = (tl.maximum(ends - starts, 0) + B - 1) // B
    first_block = tl.minimum(tl.sum(tl.where(i_group < group, counts, 0), 0), blocks)
    # The tail begins where the last group ends, and takes all entries that are left.
    start = tl.sum(tl.where(i_group == group, starts, 0), 0)
    end = tl.sum(tl.where(i_group == group, ends, 0), 0)
    count = tl.sum(tl.where(i_group == group, counts, 0), 0)
    last = tl.sum(tl.where(i_group == groups - 1, ends, 0), 0)
    in_tail = group >= groups
    start = tl.where(in_tail, last, start)
    end = tl.where(in_tail, rows, end)
    count = tl.minimum(tl.where(in_tail, blocks, count), blocks - first_block)
    # What is left of the first entry tells how many entries hold a row; of the second, a counter.
    used = first_block + (tl.maximum(rows - last, 0) + B - 1) // B
    tl.store(p_table + 3, tl.minimum(used, blocks), mask=in_tail)
    tl.store(p_table + 7, 0, mask=in_tail & (blocks > 1))
    for i in range(0, count, CHUNK):
        i_block = i + tl.arange(0, CHUNK)
        first = tl.minimum(start + i_block * B, end)
        p_entry = p_table + (first_block + i_block) * 4
        m_block = i_block < count
        tl.store(p_entry, first, mask=m_block)
        tl.store(p_entry + 1, tl.minimum(first + B, end), mask=m_block)
        tl.store(p_entry + 2, tl.zeros([CHUNK], tl.int32) + group, mask=m_block)


@triton.jit
def _table_kernel(
    p_ends,
    p_table,
    groups,
    rows,
    blocks,
    B: tl.constexpr,
    BG: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program writes the entries of one group; the last, those of the tail."""
    write_table(p_ends, p_table, tl.program_id(0), groups, rows, blocks, B, BG, CHUNK)


_write_table = Launcher(_table_kernel)


@triton.jit
def locate_block(p_table, rows, i_block, B: tl.constexpr):
    """The first row of a block, the row after its last, and its group: the last in the tail."""
    if p_table is None:
        first = i_block * B
        end = tl.minimum(first + B, rows)
        group = i_block * 0
    else:
        first = tl.load(p_table + i_block * 4)
        end = tl.load(p_table + i_block * 4 + 1)
        group = tl.load(p_table + i_block * 4 + 2)
    return first, end, group


@triton.jit
def groups_between(p_ends, groups, rows, first, B: tl.constexpr, BG: tl.constexpr):
    """The group of row ``first``, and one past the group of the last of the B rows from there.

    A kernel that needs no blocks of its groups goes over them without a table.
    """
    if p_ends is None:
        begin = first * 0
        past = begin + 1
    else:
        i_group = tl.arange(0, BG)
        ends = tl.load(p_ends + i_group, mask=i_group < groups, other=0x7FFFFFFF)
        last = tl.minimum(first + B, rows) - 1
        begin = tl.sum((ends <= first).to(tl.int32), 0)
        past = tl.minimum(tl.sum((ends <= last).to(tl.int32), 0) + 1, groups)
    return begin, past


@triton.jit
def rows_between(p_ends, group, rows, first, B: tl.constexpr):
    """Which of the B rows from ``first`` a group has: the first, and one past the last."""
    start, end = first, tl.minimum(first + B, rows)
    if p_ends is not None:
        start = tl.maximum(tl.load(p_ends + group - 1, mask=group > 0, other=0), start)
        end = tl.minimum(tl.load(p_ends + group), end)
    return start, end


def block_table(ends_G: Tensor | None, rows: int, block: int) -> Tensor | None:
    """What :func:`locate_block` reads: int32 ``(S, 4)``, an entry for each program.

    An entry is the block's first row, the row after its last and its group (``G`` in the tail).
    Blocks that hold rows come first; the fourth number of the first entry is how many do, and
    that of the second is a zero, free for a counter.
    """
    if ends_G is None:
        return None
    blocks = block_count(rows, ends_G, block)
    table_S4 = torch.empty(blocks, 4, dtype=torch.int32, device=ends_G.device)
    groups = ends_G.shape[0]
    tile: dict[str, Any] = {"B": block, "BG": next_power_of_2(groups), "CHUNK": 256}
    _write_table(groups + 1, ends_G.contiguous(), table_S4, groups, rows, blocks, **tile)
    return table_S4


def block_count(rows: int, ends_G: Tensor | None, block: int) -> int:
    """How many programs cover the rows of all groups and the tail."""
    return -(-rows // block) + (0 if ends_G is None else ends_G.shape[0])


def group_number(ends_G: Tensor | None) -> int:
    """How many groups there are; a matrix without groups is one."""
    return 1 if ends_G is None else ends_G.shape[0]


def unit_columns(x_MK: Tensor) -> Tensor:
    """``x_MK`` with neighbours of a row side by side in memory; its rows may lie anywhere."""
    return x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()


def new_bytes(rows: int, columns: int, like: Tensor) -> Tensor:
    """Bytes that nobody has written yet."""
    return torch.empty(rows, columns, dtype=torch.uint8, device=like.device)
