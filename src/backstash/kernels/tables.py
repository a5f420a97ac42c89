"""The tables of all grouped products of a layer in one launch, on a GPU.

Inside ``kernels.sharing_tables`` the first product of rows makes the tables of those after it, and
of the gradients of matrices: of :mod:`backstash.kernels.blocks` for the one, of
:mod:`backstash.kernels.tiles` for the other, each as often as there are products.  Elsewhere a
product makes its own.

Letters: M rows, G groups, S blocks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.blocks import block_count, block_table, write_table
from backstash.kernels.launches import Launcher
from backstash.kernels.reference.tables import shared_tables, sharing_tables
from backstash.kernels.sizes import next_power_of_2
from backstash.kernels.tiles import groups_by_size, write_order


@triton.jit
def _tables_kernel(
    p_ends,
    p_blocks,
    p_orders,
    groups,
    rows,
    blocks,
    orders,
    B: tl.constexpr,
    BG: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program writes what one table has of one group; the last of a table, of the tail."""
    copy = tl.program_id(0) // (groups + 1)
    group = tl.program_id(0) % (groups + 1)
    p_table = p_blocks + copy.to(tl.int64) * blocks * 4
    write_table(p_ends, p_table, group, groups, rows, blocks, B, BG, CHUNK)
    if (copy < orders) & (group < groups):
        p_order = p_orders + copy.to(tl.int64) * groups * 4
        write_order(p_ends, p_order, group, groups, rows, BG)


_write_tables = Launcher(_tables_kernel)


def row_table(ends_G: Tensor, rows: int, block: int) -> Tensor | None:
    """What :func:`~backstash.kernels.blocks.block_table` gives, maybe made before."""
    shared = shared_tables(ends_G)
    if shared is None or not ends_G.shape[0]:
        return block_table(ends_G, rows, block)
    spare = shared.spare.get((rows, block))
    if not spare:
        spare = shared.spare[rows, block] = _make(shared, rows, block)
    return spare.pop()


def column_table(ends_G: Tensor, rows: int) -> Tensor:
    """What :func:`~backstash.kernels.tiles.groups_by_size` gives, maybe made before."""
    shared = shared_tables(ends_G)
    spare = None if shared is None else shared.spare.get(rows)
    return spare.pop() if spare else groups_by_size(ends_G, rows)


def _make(shared: sharing_tables, rows: int, block: int) -> list[Tensor]:
    """Tables for products of rows; those for gradients of matrices as well, the first time."""
    ends_G = shared.ends_G
    groups, blocks = ends_G.shape[0], block_count(rows, ends_G, block)
    orders = 0 if rows in shared.spare else shared.column_products
    copies = max(shared.row_products, orders)
    new: dict[str, Any] = {"dtype": torch.int32, "device": ends_G.device}
    tables_CS4 = torch.empty(copies, blocks, 4, **new)
    # Of none that are wanted nothing is written.
    orders_CG4 = torch.empty(orders, groups, 4, **new) if orders else tables_CS4
    tile: dict[str, Any] = {"B": block, "BG": next_power_of_2(groups), "CHUNK": 256}
    programs, sizes = copies * (groups + 1), (groups, rows, blocks, orders)
    _write_tables(programs, ends_G.contiguous(), tables_CS4, orders_CG4, *sizes, **tile)
    if orders:
        shared.spare[rows] = [*orders_CG4.unbind()]
    return [*tables_CS4.unbind()]
