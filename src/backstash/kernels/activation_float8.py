"""The rows of an activation as float8 codes on a GPU, from one reading of the pre-activation.

A program has whole rows in its registers: it computes them, rounds them to the dtype that they
would have in memory, finds the largest of each and casts what it has.  A row is cut in two, a
power of two and the rest, so that few registers stand for columns that there are not.

Letters: T rows, F columns of the pre-activation, I columns of the activation (F = 2 I when
gated, else F = I), B rows of a program, L columns of a part.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.activation import activate, curve_of, halves, prob_of
from backstash.kernels.blocks import new_bytes, unit_columns
from backstash.kernels.cast.lines import LONGEST_LINE
from backstash.kernels.cast.scales import scale_of, scaling_of
from backstash.kernels.float8_rowwise import quantize_float8_rows
from backstash.kernels.launches import Launcher
from backstash.kernels.reference.activation import check_activation, curve_name
from backstash.kernels.reference.activation_float8 import Scaling
from backstash.kernels.sizes import ceil_div, next_power_of_2

# Columns of a program, if its rows have fewer, and of each of its warps.
_VALUES, _OF_A_WARP, _MOST_WARPS = 4096, 1024, 16


@triton.jit
def _part(p_gate, p_up, o_row, m_row, i_column, m_column, prob, CURVE: tl.constexpr):
    """Some columns of the activation, rounded as memory would have them."""
    mask = m_row[:, None] & m_column[None, :]
    o_h = o_row[:, None] + i_column[None, :]
    gate = tl.load(p_gate + o_h, mask=mask, other=0)
    value, _ = curve_of(gate.to(tl.float32), CURVE)
    if p_up is not None:
        value *= tl.load(p_up + o_h, mask=mask, other=0).to(tl.float32)
    if prob is not None:
        value *= prob[:, None]
    return value.to(gate.dtype).to(tl.float32)


@triton.jit
def _activate_rows_kernel(
    p_gate,
    p_up,
    p_prob,
    p_codes,
    p_scale_inv,
    rows,
    columns,
    h_stride,
    prob_stride,
    largest,
    epsilon,
    value_for_inf,
    exact,
    p_ends,
    groups,
    CURVE: tl.constexpr,
    B: tl.constexpr,
    L: tl.constexpr,
    REST: tl.constexpr,
):
    if p_ends is not None:
        rows = tl.minimum(tl.load(p_ends + groups - 1), rows)
    i_row = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    m_row = i_row < rows
    o_row = i_row * h_stride
    prob = prob_of(p_prob, i_row, m_row, prob_stride)
    i_column = tl.arange(0, L)
    m_column = i_column < columns
    a = _part(p_gate, p_up, o_row, m_row, i_column, m_column, prob, CURVE)
    # The maximum with a NaN is the other operand: a NaN does not count.
    amax = tl.maximum(tl.max(tl.abs(a), 1), 0.0)
    if REST is not None:
        i_rest = L + tl.arange(0, REST)
        m_rest = i_rest < columns
        rest = _part(p_gate, p_up, o_row, m_row, i_rest, m_rest, prob, CURVE)
        amax = tl.maximum(amax, tl.max(tl.abs(rest), 1))
    scale, inverse = scale_of(amax, largest, epsilon, value_for_inf, exact)
    tl.store(p_scale_inv + i_row, inverse, mask=m_row)
    p_row = p_codes + i_row[:, None] * columns
    codes = (a * scale[:, None]).to(p_codes.dtype.element_ty)
    tl.store(p_row + i_column[None, :], codes, mask=m_row[:, None] & m_column[None, :])
    if REST is not None:
        codes = (rest * scale[:, None]).to(p_codes.dtype.element_ty)
        tl.store(p_row + i_rest[None, :], codes, mask=m_row[:, None] & m_rest[None, :])


_activate_rows = Launcher(_activate_rows_kernel)


def activate_float8(
    h_TF: Tensor,
    prob_T: Tensor | None,
    activation: str,
    scaling: Scaling,
    ends_G: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The rows of the activation: codes ``(T, I)`` as bytes and inverse scales ``(T, 1)``.

    With the ends of groups, rows of the tail are not written.
    """
    check_activation(h_TF, prob_T, activation)
    h_TF = unit_columns(h_TF)
    gate_TI, up_TI = halves(h_TF, activation)
    rows, columns = gate_TI.shape
    if h_TF.dtype is torch.float64 or columns > LONGEST_LINE or not columns:
        a_TI = activate(h_TF, prob_T, activation, ends_G)
        return quantize_float8_rows(a_TI, scaling.code_dtype, **scaling.options)
    codes_TI = new_bytes(rows, columns, like=h_TF)
    scale_inv_T1 = torch.empty(rows, 1, dtype=torch.float32, device=h_TF.device)
    if rows:
        tile = _tile(columns, activation)
        _activate_rows(
            ceil_div(rows, tile["B"]),
            gate_TI,
            up_TI,
            prob_T,
            codes_TI.view(scaling.code_dtype),
            scale_inv_T1,
            rows,
            columns,
            h_TF.stride(0),
            0 if prob_T is None else prob_T.stride(0),
            *scaling_of(scaling.code_dtype, scaling.epsilon, power_of_two=scaling.power_of_two),
            ends_G,
            0 if ends_G is None else ends_G.shape[0],
            **tile,
        )
    return codes_TI, scale_inv_T1


@functools.cache
def _tile(columns: int, activation: str) -> dict[str, Any]:
    """The curve, rows of a program, the two parts of a row, and warps."""
    L = next_power_of_2(columns)
    REST = None
    if columns < L and L > _OF_A_WARP // 2:
        L //= 2
        REST = next_power_of_2(columns - L)
    length = L + (REST or 0)
    B = next_power_of_2(_VALUES // length + 1) // 2 if length <= _VALUES else 1
    warps = min(_MOST_WARPS, next_power_of_2(ceil_div(B * length, _OF_A_WARP)))
    tile = {"CURVE": curve_name(activation), "B": B, "L": L, "REST": REST}
    return {**tile, "num_warps": warps}
