"""The gradient of an activation as float8 codes on a GPU: values are in registers alone.

The scales are found before (:mod:`backstash.kernels.activation_magnitudes`).  Here a program
computes a tile of the activation and of its gradient again and writes it as it lies, with a
scale for each row, and turned, with one for each column of its group.

Letters: T rows, F columns of the pre-activation, I columns of the activation (F = 2 I when
gated, else F = I), G groups, P columns with padding.
"""

# What is known when a kernel is compiled has a type that this checker takes for Python's.
# pyright: reportArgumentType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.activation import activate_backward, halves, prob_of
from backstash.kernels.activation_magnitudes import (
    BLOCK_ROWS,
    MOST_COLUMNS,
    gradient_scales,
    gradients_of,
)
from backstash.kernels.blocks import locate_block, new_bytes, unit_columns
from backstash.kernels.float8_matmul import turned_places, zero_empty_group
from backstash.kernels.float8_turned import (
    prepare,
    quantize_float8_rows_and_turned,
    quantize_float8_turned,
)
from backstash.kernels.launches import Launcher
from backstash.kernels.reference.activation import (
    check_activation,
    curve_name,
)
from backstash.kernels.reference.activation_float8 import (
    ActivationCodes,
    Scaling,
    backward_in_steps,
)
from backstash.kernels.reference.float8_mm import FLOAT8_UNIT, padded_columns
from backstash.kernels.reference.float8_turned import Turned
from backstash.kernels.sizes import ceil_div

_TILE: dict[str, Any] = {"B": BLOCK_ROWS, "BI": 64, "UNIT": FLOAT8_UNIT, "num_warps": 16}


@triton.jit
def _rounded(x):
    """Rounded to bfloat16, two at a time: the compiler's own cast takes them one by one."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;",
        "=r,r,r",
        [x],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _put_rows(p_codes, x, scale, mask):
    tl.store(p_codes, (x.to(tl.float32) * scale[:, None]).to(p_codes.dtype.element_ty), mask=mask)


@triton.jit
def _put_turned(p_turned, x, p_scale, m_column, mask):
    """Turned while it has 16 bits: there are instructions for that."""
    scale = tl.load(p_scale, mask=m_column, other=0)
    codes = (tl.trans(x).to(tl.float32) * scale[:, None]).to(p_turned.dtype.element_ty)
    tl.store(p_turned, codes, mask=mask)


@triton.jit
def _codes_kernel(
    p_da,
    p_gate,
    p_up,
    p_prob,
    p_row_scale,
    p_dh_scale,
    p_a_scale,
    p_codes,
    p_dh,
    p_a,
    p_ends,
    p_padded,
    p_table,
    groups,
    rows,
    columns,
    dh_columns,
    da_stride,
    h_stride,
    prob_stride,
    turned_stride,
    blocks,
    CURVE: tl.constexpr,
    B: tl.constexpr,
    BI: tl.constexpr,
    UNIT: tl.constexpr,
):
    """A tile of one group's rows; after all tiles, the units of zeros of each empty group."""
    chunks = tl.cdiv(columns, BI)
    i_block = tl.program_id(0) // chunks
    i_column = tl.program_id(0) % chunks * BI + tl.arange(0, BI)
    m_column = i_column < columns
    ld = tl.cast(turned_stride, tl.int64)
    p_dup = p_dh + columns * ld
    if i_block < blocks:
        first, end, group = locate_block(p_table, rows, i_block, B)
        if group < groups and first < end:
            to, last = turned_places(p_ends, p_padded, group, first, rows, B, UNIT)
            i_row = first + tl.arange(0, B)
            m_row = i_row < end
            mask = m_row[:, None] & m_column[None, :]
            i_row = i_row.to(tl.int64)
            prob = prob_of(p_prob, i_row, m_row, prob_stride)
            o_da = i_row[:, None] * da_stride + i_column[None, :]
            o_h = i_row[:, None] * h_stride + i_column[None, :]
            a, dgate, dup, _ = gradients_of(p_da, p_gate, p_up, prob, o_da, o_h, mask, CURVE)
            a, dgate, dup = _rounded(a), _rounded(dgate), _rounded(dup)
            scale = tl.load(p_row_scale + i_row, mask=m_row, other=0)
            p_row = p_codes + i_row[:, None] * dh_columns + i_column[None, :]
            _put_rows(p_row, dgate, scale, mask)
            if p_up is not None:
                _put_rows(p_row + columns, dup, scale, mask)
            i_to = to + tl.arange(0, B)
            mask = m_column[:, None] & (i_to < last)[None, :]
            o_turned = i_column.to(tl.int64)[:, None] * ld + i_to.to(tl.int64)[None, :]
            o_scale = tl.cast(group, tl.int64) * columns + i_column
            _put_turned(p_a + o_turned, a, p_a_scale + o_scale, m_column, mask)
            o_scale = tl.cast(group, tl.int64) * dh_columns + i_column
            _put_turned(p_dh + o_turned, dgate, p_dh_scale + o_scale, m_column, mask)
            if p_up is not None:
                p_scale = p_dh_scale + columns + o_scale
                _put_turned(p_dup + o_turned, dup, p_scale, m_column, mask)
    else:
        group = i_block - blocks
        i_far = i_column.to(tl.int64)
        zero_empty_group(p_a, p_ends, p_padded, group, rows, i_far, m_column, ld, UNIT)
        zero_empty_group(p_dh, p_ends, p_padded, group, rows, i_far, m_column, ld, UNIT)
        if p_up is not None:
            zero_empty_group(p_dup, p_ends, p_padded, group, rows, i_far, m_column, ld, UNIT)


_write_codes = Launcher(_codes_kernel)


def activate_backward_float8(
    da_TI: Tensor,
    h_TF: Tensor,
    prob_T: Tensor | None,
    activation: str,
    ends_G: Tensor,
    scalings: tuple[Scaling, Scaling],
) -> ActivationCodes:
    """The gradient of ``activate`` both ways, and the columns of the activation again."""
    check_activation(h_TF, prob_T, activation, da_TI)
    h_TF, da_TI = unit_columns(h_TF), unit_columns(da_TI)
    given = da_TI, h_TF, prob_T
    if not _fits(da_TI, h_TF):
        steps = activate_backward, quantize_float8_rows_and_turned, quantize_float8_turned
        return backward_in_steps(given, activation, ends_G, scalings, steps)
    return _in_registers(given, activation, ends_G.int().contiguous(), scalings)


def _fits(da_TI: Tensor, h_TF: Tensor) -> bool:
    """Whether the kernels take these: pairs of bfloat16, and not too many in a row."""
    rows, columns = da_TI.shape
    are_pairs = da_TI.dtype is h_TF.dtype is torch.bfloat16 and columns % 2 == 0
    return are_pairs and 0 < columns <= MOST_COLUMNS and rows > 0


def _in_registers(
    given: tuple[Tensor, Tensor, Tensor | None],
    activation: str,
    ends_G: Tensor,
    scalings: tuple[Scaling, Scaling],
) -> ActivationCodes:
    da_TI, h_TF, prob_T = given
    dprob_T = None if prob_T is None else prob_T.new_empty(prob_T.shape)
    (rows, columns), dh_columns, groups = da_TI.shape, h_TF.shape[1], len(ends_G)
    prepared = prepare(ends_G, rows, 0)
    table, blocks, padded_G, _ = prepared
    scales = gradient_scales(
        da_TI, h_TF, (prob_T, dprob_T), activation, (ends_G, prepared), scalings
    )
    of_dh, of_a = (one.code_dtype for one in scalings)
    gate_TI, up_TI = halves(h_TF, activation)
    codes_TF = new_bytes(rows, dh_columns, like=h_TF)
    padded = padded_columns(rows, groups)
    dh_FP = new_bytes(dh_columns, padded, like=h_TF).view(of_dh)
    a_IP = new_bytes(columns, padded, like=h_TF).view(of_a)
    _write_codes(
        (blocks + groups) * ceil_div(columns, _TILE["BI"]),
        da_TI,
        gate_TI,
        up_TI,
        prob_T,
        scales.rows,
        scales.dh,
        scales.a,
        codes_TF.view(of_dh),
        dh_FP,
        a_IP,
        ends_G,
        padded_G,
        table,
        groups,
        rows,
        columns,
        dh_columns,
        da_TI.stride(0),
        h_TF.stride(0),
        0 if prob_T is None else prob_T.stride(0),
        padded,
        blocks,
        CURVE=curve_name(activation),
        **_TILE,
    )
    return ActivationCodes(
        (codes_TF, scales.rows[1].unsqueeze(1)),
        Turned(dh_FP, scales.dh[1], padded_G),
        Turned(a_IP, scales.a[1], padded_G),
        dprob_T,
    )
