"""Rows sorted by expert on a GPU, by counting: the twins of the reference.

Sorting works in blocks of rows.  The first launch counts each block's rows of each expert; the
second adds up the blocks before each block; the third sorts each block by keys no two of which are
equal, and places each row: where its expert starts, after the rows of that expert in the blocks
before, and before it in its own.  The first two are what a router counts its rows with, and who
has its tally does the third alone.  Counts and places are integers, so they are the reference's
to the last bit.

Letters: T tokens, K experts a token, R rows, E experts, S blocks of rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.launches import Launcher
from backstash.kernels.reference import permute as reference_permute
from backstash.kernels.reference import routing as reference
from backstash.kernels.reference.routing import Tally, check_experts
from backstash.kernels.sizes import ceil_div, next_power_of_2

# Rows of a block, and the fewest experts of a count.
_ROWS = 512
_LANES = 32
# Past these a program would not hold what it compares; the reference has no such limit.
_MOST_EXPERTS = 2048


@triton.jit
def _numbers(p_expert, rows, experts, first, B: tl.constexpr):
    """The experts from ``first`` on of a block's rows, which are some expert's, which are there."""
    i_row = tl.program_id(0) * B + tl.arange(0, B)
    m_row = i_row < rows
    expert = tl.load(p_expert + i_row, mask=m_row, other=-1) - first
    is_its = m_row & (expert >= 0) & (expert < experts)
    return tl.where(is_its, expert, 0).to(tl.int32), is_its, m_row


@triton.jit
def _count_kernel(p_expert, p_count, rows, experts, first, B: tl.constexpr, BE: tl.constexpr):
    """How many rows of each expert there are in one block: ``(S, BE)``."""
    expert, is_its, _ = _numbers(p_expert, rows, experts, first, B)
    count = tl.histogram(expert, BE, mask=is_its)
    tl.store(p_count + tl.program_id(0) * BE + tl.arange(0, BE), count)


@triton.jit
def _add_up_kernel(
    p_count, p_total, blocks, experts, LINES: tl.constexpr, LANES: tl.constexpr, BE: tl.constexpr
):
    """Each block's counts become those of the blocks before it; totals of a few experts."""
    i_expert = tl.program_id(0) * LANES + tl.arange(0, LANES)
    before = tl.zeros([LANES], tl.int32)
    for first in range(0, blocks, LINES):
        i_block = first + tl.arange(0, LINES)
        mask = (i_block < blocks)[:, None]
        p_tile = p_count + i_block[:, None] * BE + i_expert[None, :]
        count = tl.load(p_tile, mask=mask, other=0)
        tl.store(p_tile, tl.cumsum(count, 0) - count + before[None, :], mask=mask)
        before += tl.sum(count, 0)
    tl.store(p_total + i_expert, before, mask=i_expert < experts)


@triton.jit
def _place_kernel(
    p_expert,
    p_count,
    p_total,
    p_source,
    p_slots,
    p_ends,
    rows,
    experts,
    first,
    copies,
    count_stride,
    room,
    B: tl.constexpr,
    BE: tl.constexpr,
):
    """The rows of a block in the order of their experts, each at its place among all."""
    i_expert = tl.arange(0, BE)
    m_expert = i_expert < experts
    total = tl.load(p_total + i_expert, mask=m_expert, other=0)
    o_count = tl.program_id(0) * count_stride
    before = tl.load(p_count + o_count + i_expert, mask=m_expert, other=0)
    end = tl.cumsum(total, 0)
    if p_ends is not None:
        # One program for all.
        tl.store(
            p_ends + i_expert, end, mask=i_expert < tl.where(tl.program_id(0) == 0, experts, 0)
        )
    expert, is_its, m_row = _numbers(p_expert, rows, experts, first, B)
    own = tl.histogram(expert, BE, mask=is_its)
    # Nobody's rows come last, but for those that are not there; no two keys are equal.
    number = tl.where(is_its, expert, tl.where(m_row, BE, BE + 1))
    i_sorted = tl.arange(0, B)
    key = tl.sort(number * B + i_sorted)
    number = key // B  # pyright: ignore[reportOperatorIssue]
    i_row = tl.program_id(0) * B + key % B  # pyright: ignore[reportOperatorIssue]
    # From the place in the sorted block to that among all.
    shift = end - total + before - (tl.cumsum(own, 0) - own)
    slot = tl.gather(shift, tl.minimum(number, BE - 1), 0) + i_sorted
    # Nobody's rows come after everybody's; of the rows before this block the others are nobody's.
    last = tl.sum(total, 0) + tl.program_id(0) * B - tl.sum(before, 0) - tl.sum(own, 0)
    slot = tl.where(number < BE, slot, last + i_sorted)
    m_row = number <= BE
    tl.store(p_slots + i_row, slot.to(tl.int64), mask=m_row)
    tl.store(p_source + slot, (i_row // copies).to(tl.int64), mask=m_row & (slot < room))


_count_blocks = Launcher(_count_kernel)
_add_up = Launcher(_add_up_kernel)
_place = Launcher(_place_kernel)


def count_experts(expert_TK: Tensor, num_experts: int) -> Tally:
    """Count the rows that go to each expert; numbers outside are counted nowhere."""
    check_experts("count_experts", expert_TK)
    if num_experts > _MOST_EXPERTS:
        return reference.count_experts(expert_TK, num_experts)
    return Tally(*_count(expert_TK, num_experts, 0))


def sort_by_expert(
    expert_TK: Tensor,
    num_experts: int,
    first: int = 0,
    tally: Tally | None = None,
    rows: int | None = None,
    *,
    ends_E: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the copies of the tokens by expert, keeping the order of ``(t, k)`` inside one."""
    check_experts("sort_by_expert", expert_TK)
    if num_experts > _MOST_EXPERTS:
        return reference_permute.sort_by_expert(
            expert_TK, num_experts, first, rows=rows, ends_E=ends_E
        )
    count_SB, total_E = _counts_of(expert_TK, num_experts, first, tally)
    expert_TK = expert_TK.contiguous()
    new = {"dtype": torch.int64, "device": expert_TK.device}
    slots_TK, copies = torch.empty(expert_TK.shape, **new), expert_TK.numel()
    rows = copies if rows is None else rows
    # What no copy is for is row 0; where there is none, nothing has to be written first.
    source_R = torch.zeros(rows, **new) if rows > copies else torch.empty(rows, **new)
    if not copies and ends_E is not None:
        ends_E.zero_()
    if copies:
        _place(
            count_SB.shape[0],
            expert_TK,
            count_SB,
            total_E,
            source_R,
            slots_TK,
            ends_E,
            copies,
            num_experts,
            first,
            expert_TK.shape[1],
            count_SB.stride(0),
            rows,
            **_steps(num_experts),
        )
    return source_R, slots_TK, total_E


def _counts_of(
    expert_TK: Tensor, num_experts: int, first: int, tally: Tally | None
) -> tuple[Tensor, Tensor]:
    """Rows of each expert in the blocks of rows before each block, and in all."""
    if tally is not None and tally.expert_TK is expert_TK and tally.before_SB is not None:
        last = first + num_experts
        if first >= 0 and last <= tally.counts_E.shape[0]:
            counts_E = tally.counts_E.narrow(0, first, num_experts)
            return tally.before_SB.narrow(1, first, num_experts), counts_E
    _, total_E, before_SB = _count(expert_TK, num_experts, first)
    return before_SB, total_E


def _count(expert_TK: Tensor, num_experts: int, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """The parts of a tally of the experts from ``first`` on."""
    rows, tile = expert_TK.numel(), _steps(num_experts)
    new = {"dtype": torch.int32, "device": expert_TK.device}
    blocks, lanes = ceil_div(rows, _ROWS), tile["BE"]
    count_SB, total_E = torch.empty(blocks, lanes, **new), torch.empty(num_experts, **new)
    if blocks:
        _count_blocks(blocks, expert_TK.contiguous(), count_SB, rows, num_experts, first, **tile)
    if num_experts:
        sizes: dict[str, Any] = {"LINES": 64, "LANES": _LANES, "BE": lanes}
        _add_up(lanes // _LANES, count_SB, total_E, blocks, num_experts, **sizes)
    return expert_TK, total_E, count_SB


def _steps(num_experts: int) -> dict[str, Any]:
    lanes = max(_LANES, next_power_of_2(num_experts))
    return {"B": _ROWS, "BE": lanes}
