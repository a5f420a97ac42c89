"""Where the rows and the transposed bytes of NVFP4's blocks of rows are, on a GPU.

The bytes of a column lie together, group by group, so where a block's are depends on all
groups before.  A first launch finds that out once for each block.  Blocks that no group needs
are enough to cover the rows of the tail, 16 each, and the bytes past the last group, eight of
each column: with them a program clears what nobody else writes.

Letters: M rows, K columns, G groups, S blocks of 16 rows; NB blocks, BK columns of a program.
"""

# What is known when a kernel is compiled has a type that this checker takes for Python's.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.blocks import block_count, new_bytes
from backstash.kernels.nvfp4_codes import apart, together
from backstash.kernels.nvfp4_parts import parts_of, shifted_down
from backstash.kernels.reference.nvfp4_columns import NVFP4_BLOCK, nvfp4_column_bytes
from backstash.kernels.sizes import ceil_div, next_power_of_2

# How many programs share the entries of a group.
_PROGRAMS = 16
# So many programs a launch has at most along its second dimension.
_DOWN = 65535


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
    """Some programs write the entries of one group; the last, those of the tail.

    An entry is first row, row after the last, group, bytes of a column in all groups before,
    bytes of one in this group, bytes of one in this group's blocks before, the parts of the
    block's bytes that are stored, and whether they may lie elsewhere than at multiples of eight:
    if a group has other than whole blocks, or the buffer ends within the block.
    """
    group = tl.program_id(0)
    i_group = tl.arange(0, BG)
    ends = _end(p_ends + i_group, i_group < groups, rows)
    before = _end(p_ends + i_group - 1, (i_group > 0) & (i_group < groups), rows)
    counts = tl.maximum(ends - before, 0)
    m_before = i_group < group
    first_block = tl.sum(tl.where(m_before, (counts + 15) // 16, 0), 0)
    units = (counts + MULTIPLE - 1) // MULTIPLE
    prefix = tl.sum(tl.where(m_before, units, 0), 0) * (MULTIPLE // 2)
    uneven = tl.max((units * (MULTIPLE // 2)) & 7, 0)
    # The tail begins where the last group ends, and takes all entries that are left.  Each is
    # like a group of its own, of 16 rows, and narrower at the end of the buffer.
    in_tail = group >= groups
    start = _end(p_ends + group - 1, group > 0, rows)
    end = tl.where(in_tail, rows, _end(p_ends + group, group < groups, rows))
    count = tl.maximum(end - start, 0)
    width = (count + MULTIPLE - 1) // MULTIPLE * (MULTIPLE // 2)
    count = tl.where(in_tail, blocks, (count + 15) // 16)
    count = tl.minimum(count, blocks - tl.minimum(first_block, blocks))
    zero = tl.zeros([CHUNK], tl.int32)
    for i in range(tl.program_id(1) * CHUNK, count, tl.num_programs(1) * CHUNK):
        i_block = i + tl.arange(0, CHUNK)
        first = tl.minimum(start + i_block * 16, end)
        bytes_before = tl.where(in_tail, 0, i_block * 8)
        of_columns = prefix + i_block * 8 - bytes_before
        left = tl.minimum(tl.maximum(bound - of_columns, 0), 8)
        in_group = tl.where(in_tail, left, zero + width)
        parts = parts_of(first_block + i_block, in_group - bytes_before, bytes_before)
        of_block = uneven | (in_tail & (left < 8)).to(tl.int32)
        entry = (
            first, tl.minimum(first + 16, end), zero + group, of_columns,
            in_group, bytes_before, parts, of_block,
        )  # fmt: skip
        p_entry = p_table + (first_block + i_block[:, None]) * 8 + tl.arange(0, 8)[None, :]
        tl.store(p_entry, together(entry, 3), mask=(i_block < count)[:, None])


@triton.jit
def find_block(p_ends, groups, rows, i_block, B: tl.constexpr, BG: tl.constexpr):
    """What a table of blocks of B rows would say of one: first row, row after the last, group.

    For programs with so much to do that a search is cheaper than a launch before them.
    """
    if p_ends is None:
        first = i_block * B
        end = tl.minimum(first + B, rows)
        group = i_block * 0
    else:
        i_group = tl.arange(0, BG)
        ends = _end(p_ends + i_group, i_group < groups, rows)
        starts = _end(p_ends + i_group - 1, (i_group > 0) & (i_group < groups), rows)
        blocks = tl.cumsum((tl.maximum(ends - starts, 0) + B - 1) // B, 0)
        group = tl.sum((blocks <= i_block).to(tl.int32), 0)
        # Blocks of all groups before, and where this one is.
        before = tl.max(tl.where(blocks <= i_block, blocks, 0), 0)
        start = tl.sum(tl.where(i_group == group, starts, 0), 0)
        end = tl.sum(tl.where(i_group == group, ends, 0), 0)
        first = start + (i_block - before) * B
        end = tl.minimum(first + B, end)
    return first, end, group


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


@triton.jit
def look_at_blocks(p_table, i_first, NB: tl.constexpr, groups, rows, blocks, width):
    """What is known of NB blocks from the first and the last of them.

    Whether all are in the tail; whether all have all of their rows, and these are in groups; and
    whether the bytes of some may lie elsewhere than at multiples of eight.
    """
    if p_table is None:
        in_tail, whole, uneven = i_first < 0, 16 * (i_first + NB) <= rows, width & 7
    else:
        p_first, p_last = p_table + i_first * 8, p_table + (i_first + NB - 1) * 8
        m_last = i_first + NB <= blocks
        first, group = tl.load(p_first), tl.load(p_first + 2)
        end = tl.load(p_last + 1, mask=m_last, other=0)
        last_group = tl.load(p_last + 2, mask=m_last, other=0)
        uneven = tl.load(p_last + 7, mask=m_last, other=1)
        # Blocks are in order and have at most 16 rows.
        in_tail, whole = group >= groups, (end - first == 16 * NB) & (last_group < groups)
    return in_tail, whole, uneven


@triton.jit
def place_of(prefix, before, width, i_column, columns):
    """Where the bytes of blocks and columns ``(NB, BK)`` begin."""
    place = (prefix.to(tl.int64) * columns + before)[:, None]
    place += i_column.to(tl.int64)[None, :] * width[:, None]
    # Blocks of a group are side by side in memory: threads that are neighbours have them.
    return tl.max_contiguous(place, (8 * prefix.shape[0], 1))


@triton.jit
def load_words(p_codes, place, mask, left, size):
    """The eight bytes from any places ``(NB, BK)``, as far as they are of a group, as two words.

    They are in two or three words of the buffer, of which no byte past its ``size`` is read.
    """
    low = (place & 3).to(tl.int32)
    # Threads that are neighbours read blocks of a column, which are side by side.
    p_bytes = tl.max_contiguous(p_codes + (place - low), (place.shape[0], 1))
    count = low + tl.minimum(left, 8)[:, None]
    if size % 4 == 0:
        # A word with a byte of the buffer is all in it.
        p_words = p_bytes.to(tl.pointer_type(tl.uint32))
        first = tl.load(p_words, mask=mask & (count > 0), other=0)
        second = tl.load(p_words + 1, mask=mask & (count > 4), other=0)
        third = tl.load(p_words + 2, mask=mask & (count > 8), other=0)
    else:
        rest = size - (place - low)
        first = _load_word(p_bytes, mask & (count > 0), rest)
        second = _load_word(p_bytes + 4, mask & (count > 4), rest - 4)
        third = _load_word(p_bytes + 8, mask & (count > 8), rest - 8)
    bits = (8 * low).to(tl.uint32)
    return shifted_down(first, second, bits), shifted_down(second, third, bits)


@triton.jit
def _load_word(p_bytes, mask, rest):
    """Four bytes at multiples of four as a word, zeros where no byte is left."""
    p_word = p_bytes.to(tl.pointer_type(tl.uint32))
    word = tl.load(p_word, mask=mask & (rest >= 4), other=0)
    for i in tl.static_range(3):
        byte = tl.load(p_bytes + i, mask=mask & (rest < 4) & (rest > i), other=0)
        word |= byte.to(tl.uint32) << (8 * i)
    return word


@triton.jit
def of_fours(words):
    """Two words ``(NB, BK)`` as flat ones, those of four columns in one thread after one move."""
    N: tl.constexpr = words[0].shape[0] * words[0].shape[1]
    parts = apart(tl.reshape(tl.join(words[0], words[1]), [N // 4, 8]), 3)
    flat = ()
    for i in tl.static_range(2):
        evens, odds = tl.join(parts[i], parts[i + 4]), tl.join(parts[i + 2], parts[i + 6])
        flat += (tl.reshape(tl.join(evens, odds), [N]),)
    return flat


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
    return ceil_div(rows, multiple) * multiple // 2 if ends_G is None else 0


def are_words(rows: int, ends_G: Tensor | None, multiple: int) -> bool:
    """Whether the eight bytes of each block are known to lie at a multiple of eight."""
    width = column_width(rows, ends_G, multiple)
    return multiple == NVFP4_BLOCK or (ends_G is None and width % 8 == 0)


def column_grid(scales_SK: Tensor, tile: dict[str, Any]) -> tuple[int, int, int]:
    """A program for each few blocks of rows and columns: columns, and rows in two dimensions."""
    blocks, columns = scales_SK.shape
    down = ceil_div(blocks, tile["NB"])
    layers = max(ceil_div(down, _DOWN), 1)
    return ceil_div(columns, tile["BK"]), ceil_div(down, layers), layers


def column_table(ends_G: Tensor | None, rows: int, multiple: int) -> Tensor | None:
    """Where the rows and the bytes of each block are: int32 ``(S, 8)``."""
    if ends_G is None:
        return None
    blocks, groups = block_count(rows, ends_G, NVFP4_BLOCK), len(ends_G)
    table_S8 = torch.empty(blocks, 8, dtype=torch.int32, device=ends_G.device)
    tile: dict[str, Any] = {"BG": next_power_of_2(groups), "CHUNK": 64, "num_warps": 1}
    bound = nvfp4_column_bytes(rows, 1, groups, multiple)
    _table_kernel[(groups + 1, _PROGRAMS)](
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
