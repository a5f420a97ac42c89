"""Where tokens go, on a GPU: the twins of ``backstash.kernels.reference.routing``.

Choosing and weighing are small jobs, and what they cost is mostly launches: here each is one.
Choices are integers, so they are the reference's to the last bit.

Letters: T tokens, K experts a token, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.blocks import unit_columns
from backstash.kernels.launches import Launcher
from backstash.kernels.reference import routing as reference
from backstash.kernels.reference.routing import (
    check_parts,
    check_top,
    check_weigh,
)
from backstash.kernels.sizes import ceil_div, next_power_of_2

# Numbers that a program holds at once.
_FEW_NUMBERS = 2048
# Past these a program would not hold what it compares; the reference has no such limits.
_MOST_EXPERTS = 2048
_MOST_COPIES = 32


@triton.jit
def _top_kernel(
    p_scores,
    p_bias,
    p_expert,
    tokens,
    experts,
    scores_stride,
    K: tl.constexpr,
    BT: tl.constexpr,
    BE: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    i_expert = tl.arange(0, BE)
    m_token, m_expert = i_token < tokens, i_expert < experts
    p_row = p_scores + i_token[:, None] * scores_stride + i_expert[None, :]
    score = tl.load(p_row, mask=m_token[:, None] & m_expert[None, :], other=0)
    if p_bias is not None:
        score += tl.load(p_bias + i_expert, mask=m_expert, other=0)[None, :]
    # Bits of floats as integers in the floats' order; both zeros are one, NaN is the largest.
    bits = tl.cast(score + 0.0, tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(score != score, 0x7FFFFFFF, bits)
    # The number counts down, so the lowest is the largest among equals; no two keys are equal.
    key = bits.to(tl.int64) * 0x100000000 + (BE - 1) - i_expert[None, :]
    least: tl.constexpr = -0x8000000000000000  # pyright: ignore[reportAssignmentType]
    key = tl.where(m_expert[None, :], key, least)
    for k in tl.static_range(K):  # pyright: ignore[reportGeneralTypeIssues]
        best = tl.max(key, 1, keep_dims=True)
        i_best = BE - 1 - tl.sum(best & 0xFFFFFFFF, 1)  # pyright: ignore[reportOperatorIssue]
        tl.store(p_expert + i_token * K + k, i_best, mask=m_token)
        key = tl.where(key == best, least, key)


@triton.jit
def _weigh_kernel(
    p_logits,
    p_expert,
    p_prob,
    tokens,
    logits_stride,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    i_copy = tl.arange(0, BK)
    mask = (i_token < tokens)[:, None] & (i_copy < K)[None, :]
    o_copy = i_token[:, None] * K + i_copy[None, :]
    expert = tl.load(p_expert + o_copy, mask=mask, other=0)
    p_logit = p_logits + i_token[:, None] * logits_stride + expert
    logit = tl.load(p_logit, mask=mask, other=float("-inf"))
    largest = tl.where(i_token < tokens, tl.max(logit, 1), 0.0)
    power = tl.exp(logit - largest[:, None])
    total = tl.where(i_token < tokens, tl.sum(power, 1), 1.0)
    tl.store(p_prob + o_copy, power / total[:, None], mask=mask)


@triton.jit
def _weigh_backward_kernel(
    p_dprob,
    p_prob,
    p_expert,
    p_dlogits,
    tokens,
    experts,
    K: tl.constexpr,
    BT: tl.constexpr,
    BE: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    i_expert = tl.arange(0, BE)
    m_token = i_token < tokens
    mean = tl.zeros([BT], tl.float32)
    for k in tl.static_range(K):  # pyright: ignore[reportGeneralTypeIssues]
        prob = tl.load(p_prob + i_token * K + k, mask=m_token, other=0)
        mean += prob * tl.load(p_dprob + i_token * K + k, mask=m_token, other=0)
    dlogits = tl.zeros([BT, BE], tl.float32)
    for k in tl.static_range(K):  # pyright: ignore[reportGeneralTypeIssues]
        prob = tl.load(p_prob + i_token * K + k, mask=m_token, other=0)
        dprob = tl.load(p_dprob + i_token * K + k, mask=m_token, other=0)
        expert = tl.load(p_expert + i_token * K + k, mask=m_token, other=-1)
        is_its = expert[:, None] == i_expert[None, :]
        dlogits += tl.where(is_its, (prob * (dprob - mean))[:, None], 0.0)
    p_row = p_dlogits + i_token[:, None] * experts + i_expert[None, :]
    tl.store(p_row, dlogits, mask=m_token[:, None] & (i_expert < experts)[None, :])


@triton.jit
def _parts_kernel(p_x, p_parts, rows, columns, BT: tl.constexpr, BE: tl.constexpr):
    chunks = tl.cdiv(columns, BE)
    i_row = (tl.program_id(0) // chunks).to(tl.int64) * BT + tl.arange(0, BT)
    i_column = (tl.program_id(0) % chunks) * BE + tl.arange(0, BE)
    mask = (i_row < rows)[:, None] & (i_column < columns)[None, :]
    rest = tl.load(p_x + i_row[:, None] * columns + i_column[None, :], mask=mask, other=0)
    p_part = p_parts + i_row[:, None] * (3 * columns) + i_column[None, :]
    for part in tl.static_range(3):  # pyright: ignore[reportGeneralTypeIssues]
        rounded = rest.to(tl.bfloat16)
        tl.store(p_part + part * columns, rounded, mask=mask)
        rest -= rounded.to(tl.float32)


_choose = Launcher(_top_kernel)
_weigh = Launcher(_weigh_kernel)
_weigh_backward = Launcher(_weigh_backward_kernel)
_cut = Launcher(_parts_kernel)


def top_experts(scores_TE: Tensor, bias_E: Tensor | None, top_k: int) -> Tensor:
    """The experts with the largest ``scores + bias``, best first: ``(T, K)`` int64."""
    check_top(scores_TE, top_k)
    tokens, experts = scores_TE.shape
    values = [scores_TE] if bias_E is None else [scores_TE, bias_E]
    is_other = any(value.dtype is not torch.float32 for value in values)
    if is_other or experts > _MOST_EXPERTS or top_k > _MOST_COPIES:
        return reference.top_experts(scores_TE, bias_E, top_k)
    scores_TE = unit_columns(scores_TE)
    expert_TK = torch.empty(tokens, top_k, dtype=torch.int64, device=scores_TE.device)
    tile = {"K": top_k, **_tile(experts)}
    if expert_TK.numel():
        _choose(
            ceil_div(tokens, tile["BT"]),
            scores_TE,
            None if bias_E is None else bias_E.contiguous(),
            expert_TK,
            tokens,
            experts,
            scores_TE.stride(0),
            **tile,
        )
    return expert_TK


def weigh_experts(logits_TE: Tensor, expert_TK: Tensor) -> Tensor:
    """The weights of the chosen: the softmax over their logits, ``(T, K)``."""
    check_weigh(logits_TE, expert_TK)
    copies = expert_TK.shape[1]
    if logits_TE.dtype is not torch.float32 or copies > _MOST_COPIES:
        return reference.weigh_experts(logits_TE, expert_TK)
    logits_TE, tokens = unit_columns(logits_TE), logits_TE.shape[0]
    prob_TK = torch.empty(tokens, copies, dtype=torch.float32, device=logits_TE.device)
    tile: dict[str, Any] = {"K": copies, "BK": next_power_of_2(max(copies, 1)), "BT": 64}
    if prob_TK.numel():
        _weigh(
            ceil_div(tokens, tile["BT"]),
            logits_TE,
            expert_TK.contiguous(),
            prob_TK,
            tokens,
            logits_TE.stride(0),
            **tile,
        )
    return prob_TK


def weigh_experts_backward(
    dprob_TK: Tensor, prob_TK: Tensor, expert_TK: Tensor, num_experts: int
) -> Tensor:
    """The gradient of :func:`weigh_experts`' logits, ``(T, E)`` in ``prob_TK``'s dtype."""
    tokens, copies = prob_TK.shape
    is_large = num_experts > _MOST_EXPERTS or copies > _MOST_COPIES
    if is_large or prob_TK.dtype is not torch.float32:
        return reference.weigh_experts_backward(dprob_TK, prob_TK, expert_TK, num_experts)
    new = {"dtype": torch.float32, "device": prob_TK.device}
    dlogits_TE = torch.empty(tokens, num_experts, **new)
    tile = {"K": copies, **_tile(num_experts)}
    if dlogits_TE.numel():
        _weigh_backward(
            ceil_div(tokens, tile["BT"]),
            dprob_TK.contiguous(),
            prob_TK.contiguous(),
            expert_TK.contiguous(),
            dlogits_TE,
            tokens,
            num_experts,
            **tile,
        )
    return dlogits_TE


def bfloat16_parts(x_TE: Tensor) -> Tensor:
    """Three bfloat16 side by side, ``(T, 3 E)``, that add up to a float32 almost exactly."""
    check_parts(x_TE)
    rows, columns = x_TE.shape
    parts_TP = torch.empty(rows, 3 * columns, dtype=torch.bfloat16, device=x_TE.device)
    tile = _tile(columns)
    programs = ceil_div(rows, tile["BT"]) * ceil_div(columns, tile["BE"])
    if programs:
        _cut(programs, x_TE.contiguous(), parts_TP, rows, columns, **tile)
    return parts_TP


def _tile(columns: int) -> dict[str, Any]:
    width = min(_FEW_NUMBERS, max(16, next_power_of_2(max(columns, 1))))
    return {"BT": _FEW_NUMBERS // width, "BE": width}
