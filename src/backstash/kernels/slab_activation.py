"""The activation of rows in slabs, on a GPU: the twin of ``backstash.kernels.reference.slabs``.

A program takes a few rows of a slab, so where they are is known from its number alone: which rows
of the groups they are, which is asked for meanwhile, only says where the result goes.

Letters: T rows, F columns of the pre-activation, I columns of the activation.
"""

# The type checker knows neither launch options nor loops that Triton unrolls.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportOptionalSubscript=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.activation import curve_of, prob_of
from backstash.kernels.launches import Launcher
from backstash.kernels.reference.activation import ACTIVATIONS, check_activation, curve_name
from backstash.kernels.reference.slabs import SLAB_ROWS, Slabs, slabs_for
from backstash.kernels.sizes import next_power_of_2
from backstash.kernels.slabs import find_slab, lookup_of, rows_from

_ROWS, _COLUMNS = 8, 256


@triton.jit
def _activate_kernel(
    h_slabs,
    p_prob,
    p_a,
    p_ends,
    groups,
    rows,
    columns,
    prob_stride,
    CURVE: tl.constexpr,
    IS_GATED: tl.constexpr,
    BT: tl.constexpr,
    BI: tl.constexpr,
    BG: tl.constexpr,
    PAGE: tl.constexpr,
):
    chunks = columns // BI
    column = tl.program_id(0) % chunks * BI
    i_padded = (tl.program_id(0) // chunks).to(tl.int64) * BT
    p_gate, is_there = find_slab(h_slabs, i_padded, column, PAGE)
    if IS_GATED:
        p_up, is_there = find_slab(h_slabs, i_padded, columns + column, PAGE)
    first, end = rows_from(h_slabs, i_padded, p_ends, groups, rows, BG)
    if first < end:
        i_row = first + tl.arange(0, BT)
        mask = (i_row < tl.where(is_there, end, 0))[:, None]
        i_chunk = tl.arange(0, BI)[None, :]
        o_h = tl.arange(0, BT)[:, None] * PAGE + i_chunk
        gate = tl.load(p_gate + o_h, mask=mask, other=0).to(tl.float32)
        value, _ = curve_of(gate, CURVE)
        if IS_GATED:
            value *= tl.load(p_up + o_h, mask=mask, other=0).to(tl.float32)
        if p_prob is not None:
            value *= prob_of(p_prob, i_row, i_row < end, prob_stride)[:, None]
        p_to = p_a + (i_row * columns + column)[:, None] + i_chunk
        tl.store(p_to, value.to(p_a.dtype.element_ty), mask=(i_row < end)[:, None])


_activate = Launcher(_activate_kernel)


def activate_slabs(h: Slabs, prob_T: Tensor | None, activation: str) -> Tensor:
    """Apply ``activation`` to rows in slabs; rows of the tail are not written."""
    check_activation(h, prob_T, activation)
    rows, columns = h.shape
    is_gated = ACTIVATIONS[activation]
    columns = columns // 2 if is_gated else columns
    a_TI = torch.empty(rows, columns, dtype=h.dtype, device=h.device)
    groups = len(h.ends_G)
    programs = slabs_for(rows, groups) * (SLAB_ROWS // _ROWS) * (columns // _COLUMNS)
    tile: dict[str, Any] = {"CURVE": curve_name(activation), "IS_GATED": is_gated}
    if programs:
        _activate(
            programs,
            lookup_of(h),
            prob_T,
            a_TI,
            h.ends_G,
            groups,
            rows,
            columns,
            0 if prob_T is None else prob_T.stride(0),
            **tile,
            BT=_ROWS,
            BI=_COLUMNS,
            BG=next_power_of_2(groups),
            PAGE=h.pages().shape[1],
        )
    return a_TI
