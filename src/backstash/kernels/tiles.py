"""The order in which a grouped product's tiles are worked on, written by the GPU itself.

The sizes of the groups are on the device, so the host cannot know how many tiles there are or
how long each takes.  Where every tile is as long as any other (rows times a weight), the table
of :mod:`backstash.kernels.blocks` is order enough.  Where a tile is as long as its group (the
gradient of a weight), the longest goes first: a long tile that starts last would leave every
other processor waiting for it.  The tiles are then given out one by one, by a counter that the
same launch sets to zero.

Letters: M rows, G groups.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.blocks import group_rows
from backstash.kernels.launches import Launcher
from backstash.kernels.sizes import next_power_of_2


@triton.jit
def write_order(p_ends, p_table, group, groups, rows, BG: tl.constexpr):
    """Find the rank of one group, and write its rows there."""
    i_group = tl.arange(0, BG)
    m_group = i_group < groups
    starts, ends = group_rows(p_ends, i_group, m_group, rows)
    counts = tl.maximum(ends - starts, 0)
    count = tl.sum(tl.where(i_group == group, counts, 0), 0)
    is_before = (counts > count) | ((counts == count) & (i_group < group))
    rank = tl.sum((is_before & m_group).to(tl.int32), 0)
    start = tl.sum(tl.where(i_group == group, starts, 0), 0)
    tl.store(p_table + rank * 4, start)
    tl.store(p_table + rank * 4 + 1, start + count)
    tl.store(p_table + rank * 4 + 2, group)
    tl.store(p_table + rank * 4 + 3, 0)


@triton.jit
def _order_kernel(p_ends, p_table, groups, rows, BG: tl.constexpr):
    """One program writes the entry of one group."""
    write_order(p_ends, p_table, tl.program_id(0), groups, rows, BG)


_write_order = Launcher(_order_kernel)


def groups_by_size(ends_G: Tensor, rows: int) -> Tensor:
    """The groups with the most rows first: int32 ``(G, 4)``, groups of one size in their order.

    An entry is a group's first row, the row after its last, its number, and a zero.  The zero
    of the first entry is free for a counter.
    """
    groups = ends_G.shape[0]
    table_G4 = torch.empty(groups, 4, dtype=torch.int32, device=ends_G.device)
    tile: dict[str, Any] = {"BG": next_power_of_2(groups)}
    if groups:
        _write_order(groups, ends_G.contiguous(), table_G4, groups, rows, **tile)
    return table_G4
