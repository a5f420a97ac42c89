"""Activations on a GPU, each in one pass: the twins of ``backstash.kernels.reference.activation``.

Forward reads the pre-activation and writes the activation.  Backward reads both gradients'
sources once, computes the activation again on the way and writes it if somebody reads it, and
adds up each row's routing weight's gradient in the same program, so its order never changes.
float64 goes to the
reference: it is what gradients are checked in, not what anybody trains in.

Letters: T rows, F columns of the pre-activation, I columns of the activation.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.blocks import unit_columns
from backstash.kernels.reference import activation as reference
from backstash.kernels.reference.activation import (
    ACTIVATIONS,
    ActivationGradients,
    check_activation,
    curve_name,
)

_ROWS = 8
_COLUMNS = 256


@triton.jit
def _curve(x, CURVE: tl.constexpr):
    """The value and the slope of an ungated activation."""
    if CURVE == "relu":
        value = tl.where(x > 0, x, 0 * x)
        slope = (x > 0).to(x.dtype)
    elif CURVE == "silu":
        s = 1.0 / (1.0 + tl.exp(-x))
        value = x * s
        slope = s * (1.0 + x * (1.0 - s))
    else:
        below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        density = tl.exp(-0.5 * x * x) * 0.3989422804014327
        value = x * below
        slope = below + x * density
    return value, slope


@triton.jit
def _activate_kernel(
    p_gate,
    p_up,
    p_prob,
    p_a,
    rows,
    columns,
    h_stride,
    prob_stride,
    CURVE: tl.constexpr,
    BT: tl.constexpr,
    BI: tl.constexpr,
):
    chunks = tl.cdiv(columns, BI)
    i_row = (tl.program_id(0) // chunks).to(tl.int64) * BT + tl.arange(0, BT)
    i_column = (tl.program_id(0) % chunks) * BI + tl.arange(0, BI)
    mask = (i_row < rows)[:, None] & (i_column < columns)[None, :]
    o_h = i_row[:, None] * h_stride + i_column[None, :]
    gate = tl.load(p_gate + o_h, mask=mask, other=0).to(tl.float32)
    value, _ = _curve(gate, CURVE)
    if p_up is not None:
        value *= tl.load(p_up + o_h, mask=mask, other=0).to(tl.float32)
    if p_prob is not None:
        prob = tl.load(p_prob + i_row * prob_stride, mask=i_row < rows, other=0).to(tl.float32)
        value *= prob[:, None]
    o_a = i_row[:, None] * columns + i_column[None, :]
    tl.store(p_a + o_a, value.to(p_a.dtype.element_ty), mask=mask)


@triton.jit
def _activate_backward_kernel(
    p_da,
    p_gate,
    p_up,
    p_prob,
    p_dgate,
    p_dup,
    p_dprob,
    p_a,
    rows,
    columns,
    da_stride,
    h_stride,
    dh_stride,
    a_stride,
    prob_stride,
    CURVE: tl.constexpr,
    BT: tl.constexpr,
    BI: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    m_row = i_row < rows
    dprob = tl.zeros([BT, BI], tl.float32)
    prob = tl.zeros([BT], tl.float32)
    if p_prob is not None:
        prob = tl.load(p_prob + i_row * prob_stride, mask=m_row, other=0).to(tl.float32)
    for first in range(0, columns, BI):
        i_column = first + tl.arange(0, BI)
        mask = m_row[:, None] & (i_column < columns)[None, :]
        o_h = i_row[:, None] * h_stride + i_column[None, :]
        o_dh = i_row[:, None] * dh_stride + i_column[None, :]
        o_da = i_row[:, None] * da_stride + i_column[None, :]
        da = tl.load(p_da + o_da, mask=mask, other=0).to(tl.float32)
        gate = tl.load(p_gate + o_h, mask=mask, other=0).to(tl.float32)
        value, slope = _curve(gate, CURVE)
        plain = value
        if p_up is not None:
            up = tl.load(p_up + o_h, mask=mask, other=0).to(tl.float32)
            plain = value * up
        if p_prob is not None:
            dprob += da * plain
            da = da * prob[:, None]
            plain *= prob[:, None]
        # A thread stores where it has loaded: gradients may take the place of what they are of.
        if p_a is not None:
            o_a = i_row[:, None] * a_stride + i_column[None, :]
            tl.store(p_a + o_a, plain.to(p_a.dtype.element_ty), mask=mask)
        if p_up is not None:
            tl.store(p_dup + o_dh, (da * value).to(p_dup.dtype.element_ty), mask=mask)
            da = da * up
        tl.store(p_dgate + o_dh, (da * slope).to(p_dgate.dtype.element_ty), mask=mask)
    if p_prob is not None:
        dprob_T = tl.sum(dprob, 1)
        tl.store(p_dprob + i_row, dprob_T.to(p_dprob.dtype.element_ty), mask=m_row)


def activate(h_TF: Tensor, prob_T: Tensor | None, activation: str) -> Tensor:
    """Apply ``activation`` to each row and multiply it by the row's weight, if there is one."""
    if h_TF.dtype is torch.float64:
        return reference.activate(h_TF, prob_T, activation)
    check_activation(h_TF, prob_T, activation)
    h_TF = unit_columns(h_TF)
    gate_TI, up_TI = _halves(h_TF, activation)
    rows, columns = gate_TI.shape
    a_TI = torch.empty(rows, columns, dtype=h_TF.dtype, device=h_TF.device)
    tile = _tile(columns, activation)
    programs = triton.cdiv(rows, _ROWS) * triton.cdiv(columns, tile["BI"])
    if programs:
        _activate_kernel[(programs,)](
            gate_TI,
            up_TI,
            prob_T,
            a_TI,
            rows,
            columns,
            h_TF.stride(0),
            0 if prob_T is None else prob_T.stride(0),
            **tile,
        )
    return a_TI


def activate_backward(
    da_TI: Tensor,
    h_TF: Tensor,
    prob_T: Tensor | None,
    activation: str,
    into: ActivationGradients | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Give the gradients of :func:`activate`, with the activation computed again from ``h_TF``."""
    if h_TF.dtype is torch.float64:
        return reference.activate_backward(da_TI, h_TF, prob_T, activation, into)
    check_activation(h_TF, prob_T, activation, da_TI)
    h_TF, da_TI = unit_columns(h_TF), unit_columns(da_TI)
    dh_TF, dprob_T, a_TI = into or _new_gradients(h_TF, prob_T)
    gate_TI, up_TI = _halves(h_TF, activation)
    dgate_TI, dup_TI = _halves(dh_TF, activation)
    rows, columns = gate_TI.shape
    if rows and columns:
        _activate_backward_kernel[(triton.cdiv(rows, _ROWS),)](
            da_TI,
            gate_TI,
            up_TI,
            prob_T,
            dgate_TI,
            dup_TI,
            dprob_T,
            a_TI,
            rows,
            columns,
            da_TI.stride(0),
            h_TF.stride(0),
            dh_TF.stride(0),
            0 if a_TI is None else a_TI.stride(0),
            0 if prob_T is None else prob_T.stride(0),
            **_tile(columns, activation),
        )
    return dh_TF, dprob_T


def _new_gradients(h_TF: Tensor, prob_T: Tensor | None) -> ActivationGradients:
    # Rows are side by side, however those of the values lie.
    dh_TF = h_TF.new_empty(h_TF.shape)
    # Rows without columns add up to nothing, and no program writes that.
    dprob_T = None if prob_T is None else prob_T.new_zeros(prob_T.shape)
    return ActivationGradients(dh_TF, dprob_T, None)


def _halves(h_TF: Tensor, activation: str) -> tuple[Tensor, Tensor | None]:
    if not ACTIVATIONS[activation]:
        return h_TF, None
    columns = h_TF.shape[1] // 2
    return h_TF[:, :columns], h_TF[:, columns:]


def _tile(columns: int, activation: str) -> dict[str, Any]:
    return {
        "CURVE": curve_name(activation),
        "BT": _ROWS,
        "BI": min(_COLUMNS, max(16, triton.next_power_of_2(columns))),
    }
