"""Where the rows and the transposed bytes of NVFP4's blocks of rows are, on a GPU.

The bytes of a column lie together, group by group, so where a block's are depends on all
groups before.  A first launch finds that out once for each block.  Blocks that no group needs
are enough to cover the rows of the tail, 16 each, and the bytes past the last group, eight of
each column: with them a program clears what nobody else writes.

Letters: M rows, K columns, G groups, S blocks of 16 rows.
"""

# What is known when a kernel is compiled has a type that this checker takes for Python's.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.blocks import block_count, new_bytes
from backstash.kernels.reference.nvfp4_columns import NVFP4_BLOCK, nvfp4_column_bytes


@triton.jit(do_not_specialize=["groups", "rows", "blocks", "bound"])
def _table_kernel(
    p_ends,
    p_table,
    groups,
    rows,
    blocks,
    bound,
    MULTIPLE: tl.constexpr,
    BG: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program writes the entries of one group; the last, those of the tail.

    An entry is first row, row after the last, group, bytes of a column in all groups before,
    bytes of one in this group, and bytes of one in this group's blocks before.
    """
    group = tl.program_id(0)
    i_group = tl.arange(0, BG)
    ends = _end(p_ends + i_group, i_group < groups, rows)
    before = _end(p_ends + i_group - 1, (i_group > 0) & (i_group < groups), rows)
    counts = tl.maximum(ends - before, 0)
    m_before = i_group < group
    first_block = tl.sum(tl.where(m_before, (counts + 15) // 16, 0), 0)
    prefix = tl.sum(tl.where(m_before, (counts + MULTIPLE - 1) // MULTIPLE, 0), 0) * (MULTIPLE // 2)
    # The tail begins where the last group ends, and takes all entries that are left.  Each is
    # like a group of its own, of 16 rows, and narrower at the end of the buffer.
    in_tail = group >= groups
    start = _end(p_ends + group - 1, group > 0, rows)
    end = tl.where(in_tail, rows, _end(p_ends + group, group < groups, rows))
    count = tl.maximum(end - start, 0)
    width = (count + MULTIPLE - 1) // MULTIPLE * (MULTIPLE // 2)
    count = tl.where(in_tail, blocks, (count + 15) // 16)
    count = tl.minimum(count, blocks - tl.minimum(first_block, blocks))
    i_entry = tl.arange(0, 8)[None, :]
    for i in range(0, count, CHUNK):
        i_block = i + tl.arange(0, CHUNK)[:, None]
        first = tl.minimum(start + i_block * 16, end)
        bytes_before = tl.where(in_tail, 0, i_block * 8)
        of_columns = prefix + i_block * 8 - bytes_before
        left = tl.minimum(tl.maximum(bound - of_columns, 0), 8)
        entry = tl.where(i_entry == 0, first, tl.minimum(first + 16, end))
        entry = tl.where(i_entry == 2, group, entry)
        entry = tl.where(i_entry == 3, of_columns, entry)
        entry = tl.where(i_entry == 4, tl.where(in_tail, left, width), entry)
        entry = tl.where(i_entry == 5, bytes_before, entry)
        tl.store(p_table + (first_block + i_block) * 8 + i_entry, entry, mask=i_block < count)


@triton.jit
def _end(p_end, mask, rows):
    """The end of a group, cut at the buffer; zero before the first."""
    end = tl.load(p_end, mask=mask, other=0)
    return tl.minimum(tl.maximum(end, 0), rows).to(tl.int32)


@triton.jit
def locate_blocks(p_table, rows, width, i_block, blocks):
    """What the table says of some blocks; without one, what is plain to see."""
    if p_table is None:
        first = tl.minimum(i_block * 16, rows)
        end = tl.minimum(first + 16, rows)
        group, prefix, before = i_block * 0, i_block * 0, i_block * 8
        # A block past the last has no bytes.
        width = tl.where(i_block < blocks, width, 0)
    else:
        p_entry, m_block = p_table + i_block * 8, i_block < blocks
        first = tl.load(p_entry, mask=m_block, other=0)
        end = tl.load(p_entry + 1, mask=m_block, other=0)
        group = tl.load(p_entry + 2, mask=m_block, other=0)
        prefix = tl.load(p_entry + 3, mask=m_block, other=0)
        width = tl.load(p_entry + 4, mask=m_block, other=0)
        before = tl.load(p_entry + 5, mask=m_block, other=0)
    return first, end, group, prefix, width, before


def new_columns(x_MK: Tensor, ends_G: Tensor | None, multiple: int) -> tuple[Tensor, Tensor]:
    """Codes, flat, and scales ``(S, K)`` that nobody has written yet."""
    rows, columns = x_MK.shape
    size = nvfp4_column_bytes(rows, columns, None if ends_G is None else len(ends_G), multiple)
    codes = torch.empty(size, dtype=torch.uint8, device=x_MK.device)
    return codes, new_bytes(block_count(rows, ends_G, NVFP4_BLOCK), columns, like=x_MK)


def row_multiple(rotation_BB: Tensor | None) -> int:
    """To how many rows the columns of a group are padded."""
    return 2 if rotation_BB is None else NVFP4_BLOCK


def column_width(rows: int, ends_G: Tensor | None, multiple: int) -> int:
    """Bytes of a column of a matrix without groups; the table knows those of groups."""
    return triton.cdiv(rows, multiple) * multiple // 2 if ends_G is None else 0


def are_words(rows: int, ends_G: Tensor | None, multiple: int) -> bool:
    """Whether the eight bytes of each block are known to lie at a multiple of eight."""
    width = column_width(rows, ends_G, multiple)
    return multiple == NVFP4_BLOCK or (ends_G is None and width % 8 == 0)


def column_table(ends_G: Tensor | None, rows: int, multiple: int) -> Tensor | None:
    """Where the rows and the bytes of each block are: int32 ``(S, 8)``."""
    if ends_G is None:
        return None
    blocks, groups = block_count(rows, ends_G, NVFP4_BLOCK), len(ends_G)
    table_S8 = torch.empty(blocks, 8, dtype=torch.int32, device=ends_G.device)
    tile: dict[str, Any] = {"BG": triton.next_power_of_2(groups), "CHUNK": 512}
    bound = nvfp4_column_bytes(rows, 1, groups, multiple)
    _table_kernel[(groups + 1,)](
        ends_G.contiguous(),
        table_S8,
        groups,
        rows,
        blocks,
        bound,
        MULTIPLE=multiple,
        **tile,
    )
    return table_S8
