"""Rows in slabs on a GPU: claiming them, filling them, and where rows are, for other kernels.

A row's place is found from its group: ``shift_G`` says how many rows later a group begins than
it would without rows to spare, and whole slabs are counted from there.  What found no room has a
page past the last, where nothing is read or written.

The twins of ``backstash.kernels.reference.slabs``.
"""

# The type checker knows neither launch options nor loops that Triton unrolls.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.device import capability
from backstash.kernels.blocks import unit_columns
from backstash.kernels.free_pages import HEADER, commit, is_last, read_pool, ring_places
from backstash.kernels.launches import Launcher
from backstash.kernels.reference import slabs as reference
from backstash.kernels.reference.grouped_mm import check_grouped
from backstash.kernels.reference.pages import PoolState
from backstash.kernels.reference.slabs import Slabs, slab_width, slabs_for
from backstash.kernels.sizes import ceil_div, next_power_of_2

try:
    from backstash.kernels.slab_rows import multiply_slabs
    from backstash.kernels.warpgroups import DTYPES, aligned
except (ImportError, AttributeError):
    # Gluon is new in Triton and still changes its names.
    DTYPES = {}

ROWS = tl.constexpr(reference.SLAB_ROWS)
NUMBERS_GIVEN = tl.constexpr(int(PoolState.NUMBERS_GIVEN))
# Rows of a tile of copies, and the columns of the widest tile that lies in one slab.
_COPIED_ROWS, _TILE_COLUMNS = 16, 256
# Slots that a program claims at a time, and how many programs at most do.
_CLAIMED, _PROGRAMS = 1024, 16
_HOPPER = 9


def lookup_of(slabs: Slabs) -> tuple[Any, ...]:
    """A matrix in slabs as kernels take it."""
    pages = slabs.pages()
    size = len(pages) // ROWS.value
    return pages, slabs.table, slabs.shift_G, slabs.first, slabs.pitch, size


@triton.jit
def load_ends(p_ends, groups, rows, BG: tl.constexpr):
    """The ends of the groups, cut at the buffer; those of groups that are not there are zero."""
    i_group = tl.arange(0, BG)
    ends = tl.load(p_ends + i_group, mask=i_group < groups, other=0)
    return tl.minimum(tl.maximum(ends, 0), rows).to(tl.int32)


@triton.jit
def load_starts(p_ends, groups, rows, BG: tl.constexpr):
    """Where the groups begin, cut at the buffer; those that are not there begin at zero."""
    i_group = tl.arange(0, BG)
    m_group = (i_group < groups) & (i_group > 0)
    starts = tl.load(p_ends + i_group - 1, mask=m_group, other=0)
    return tl.minimum(tl.maximum(starts, 0), rows).to(tl.int32)


@triton.jit
def padded_rows(lookup, i_row, m_row, p_ends, groups, rows, BG: tl.constexpr):
    """Where rows of groups are among those of all slabs; zero for what is masked."""
    is_passed = load_ends(p_ends, groups, rows, BG)[None, :] <= i_row[:, None]
    group = tl.sum((is_passed & (tl.arange(0, BG) < groups)[None, :]).to(tl.int32), 1)
    return tl.where(m_row, i_row + tl.load(lookup[2] + group, mask=m_row, other=0), 0)


@triton.jit
def rows_from(lookup, i_padded, p_ends, groups, rows, BG: tl.constexpr):
    """Which row is the one at ``i_padded`` among those of all slabs, and where its group ends.

    Past the last slab that end is zero.
    """
    ends, starts = load_ends(p_ends, groups, rows, BG), load_starts(p_ends, groups, rows, BG)
    i_group = tl.arange(0, BG)
    shift = tl.load(lookup[2] + i_group, mask=i_group < groups, other=0)
    after = starts + shift + tl.cdiv(tl.maximum(ends - starts, 0), ROWS) * ROWS
    is_in = (i_padded >= starts + shift) & (i_padded < after) & (i_group < groups)
    return i_padded - tl.sum(tl.where(is_in, shift, 0), 0), tl.sum(tl.where(is_in, ends, 0), 0)


@triton.jit
def find_slab(lookup, i_padded, column, PAGE: tl.constexpr):
    """Where a column of one or some rows of all slabs is, and whether it is in any page."""
    p_pages, p_table, _, first, pitch, pages = lookup
    page = tl.load(p_table + first + i_padded // ROWS * pitch + column // PAGE)
    # Columns come in whole units, which the compiler does not see of what is left of a division.
    o_column = tl.multiple_of(column % PAGE, 16)
    return p_pages + ((page * ROWS + i_padded % ROWS) * PAGE + o_column), page < pages


@triton.jit(do_not_specialize=["device_size", "host_size", "number"])
def _claim(
    p_ends,
    p_shift,
    p_table,
    p_free,
    p_state,
    p_receipt,
    groups,
    rows,
    device_size,
    host_size,
    number,
    STRIPS: tl.constexpr,
    STRIP_BYTES: tl.constexpr,
    BUFFERS: tl.constexpr,
    BG: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_group = tl.arange(0, BG)
    ends, starts = load_ends(p_ends, groups, rows, BG), load_starts(p_ends, groups, rows, BG)
    slabs = tl.cdiv(tl.maximum(ends - starts, 0), ROWS)
    high = tl.sum(slabs, 0)
    head_device, head_host, free_device, _ = read_pool(p_state)
    sizes = (device_size, host_size)
    place, _ = ring_places(head_device, head_host, sizes)
    total, nbytes = 0, tl.full((), 0, tl.int64)
    for i in tl.static_range(BUFFERS):
        valid = tl.max(ends, 0).to(tl.int64) * STRIPS[i] * STRIP_BYTES
        if tl.program_id(0) == 0:
            tl.store(p_table + HEADER + i, valid)
            tl.store(p_table + HEADER + BUFFERS + i, total)
        total += high * STRIPS[i]
        nbytes += valid
    found = tl.where(total <= free_device, total, 0)
    p_slots = p_table + HEADER + 2 * BUFFERS
    for o_slot in range(tl.program_id(0) * BLOCK, total, tl.num_programs(0) * BLOCK):
        i_slot = o_slot + tl.arange(0, BLOCK)
        i_free = place + i_slot
        i_free -= tl.where(i_free >= device_size, device_size, 0)
        page = tl.load(p_free + i_free, mask=i_slot < found, other=device_size)
        tl.store(p_slots + i_slot, page.to(tl.int64), mask=i_slot < total)
    if tl.program_id(0) == 0:
        shift = (tl.cumsum(slabs, 0) - slabs) * ROWS - starts
        tl.store(p_shift + i_group, shift, mask=i_group < groups)
    # All count themselves in, as they do where they take parts in turn.
    if is_last(0, 0, p_state + NUMBERS_GIVEN, False):
        commit(p_state, p_table, p_receipt, sizes, total, nbytes, number)


@triton.jit
def _permute_kernel(
    p_x,
    p_source,
    lookup,
    p_ends,
    groups,
    rows,
    columns,
    x_stride,
    blocks,
    BR: tl.constexpr,
    BH: tl.constexpr,
    BG: tl.constexpr,
    PAGE: tl.constexpr,
):
    # Strip after strip: programs run in the order of their numbers.
    i_padded = (tl.program_id(0) % blocks).to(tl.int64) * BR
    column = (tl.program_id(0) // blocks) * BH
    p_to, is_there = find_slab(lookup, i_padded, column, PAGE)
    first, end = rows_from(lookup, i_padded, p_ends, groups, rows, BG)
    if end > 0:
        i_row = first + tl.arange(0, BR)
        m_row = i_row < end
        i_source = tl.load(p_source + i_row, mask=m_row, other=0).to(tl.int64)
        i_column = tl.arange(0, BH)[None, :]
        p_from = p_x + i_source[:, None] * x_stride + column + i_column
        x = tl.load(p_from, mask=m_row[:, None] & (column + i_column < columns), other=0)
        i_to = tl.arange(0, BR)
        m_to = (i_to < tl.where(is_there, BR, 0))[:, None]
        tl.store(p_to + i_to[:, None] * PAGE + i_column, x, mask=m_to)


_launch_claim, _permute = Launcher(_claim), Launcher(_permute_kernel)


def has_slabs(like: Tensor, columns: Sequence[int], page_bytes: int) -> bool:
    """Are there operations on slabs of tensors ``like`` this one, so many columns wide?"""
    width = slab_width(like.dtype, page_bytes)
    # Of both halves of a gated row, tiles lie in one slab as well.
    if like.dtype not in DTYPES or width == 0 or width % (2 * _TILE_COLUMNS):
        return False
    return capability(like.device)[0] == _HOPPER and not any(c % width for c in columns)


def claim_slabs(
    ends_G: Tensor,
    rows: int,
    columns: Sequence[int],
    dtype: torch.dtype,
    table: Tensor,
    shift_G: Tensor,
    device_pages: Tensor,
    free_N: Tensor,
    state: Tensor,
    receipt: Tensor,
    *,
    page_bytes: int,
    number: int,
) -> None:
    """Take pages for matrices of so many columns, all or none, and write down where."""
    groups, width = len(ends_G), slab_width(dtype, page_bytes)
    strips = tuple([c // width for c in columns])
    size = device_pages.numel() // page_bytes
    programs = ceil_div(slabs_for(rows, groups) * sum(strips), _CLAIMED)
    _launch_claim(
        # One at least: that no pages are needed has to be written down as well.
        min(max(programs, 1), _PROGRAMS),
        ends_G,
        shift_G,
        table,
        free_N,
        state,
        receipt,
        groups,
        rows,
        size,
        free_N.numel() - size,
        number,
        STRIPS=strips,
        STRIP_BYTES=width * dtype.itemsize,
        BUFFERS=len(columns),
        BG=next_power_of_2(groups),
        BLOCK=_CLAIMED,
        num_warps=4,
    )


def permute_into_slabs(x_TH: Tensor, source_R: Tensor, into: Slabs) -> None:
    """Copy each valid row's token into its slab; rows to spare become zeros."""
    x_TH = unit_columns(x_TH)
    (rows, columns), groups = into.shape, len(into.ends_G)
    blocks = slabs_for(rows, groups) * (ROWS.value // _COPIED_ROWS)
    tile: dict[str, Any] = {"BR": _COPIED_ROWS, "BH": _TILE_COLUMNS}
    if blocks:
        _permute(
            blocks * ceil_div(columns, tile["BH"]),
            x_TH,
            source_R.contiguous(),
            lookup_of(into),
            into.ends_G,
            groups,
            rows,
            columns,
            x_TH.stride(0),
            blocks,
            **tile,
            BG=next_power_of_2(groups),
            PAGE=into.pages().shape[1],
        )


def grouped_mm_in_slabs(x: Slabs, w_GNK: Tensor, into: Slabs) -> None:
    """Multiply rows in slabs by their group's weight, into slabs of the same launch."""
    check_grouped("grouped_mm_in_slabs", _shaped(x, w_GNK), w_GNK, x.ends_G, columns_dim=2)
    reference.check_into(x, w_GNK, into)
    if x.shape[0] and len(w_GNK):
        multiply_slabs(x, aligned(w_GNK), x.ends_G, into)


def _shaped(slabs: Slabs, like: Tensor) -> Tensor:
    """A tensor of the same shape and dtype, of which no value is looked at."""
    return like.new_empty(1, dtype=slabs.dtype).expand(slabs.shape)
