"""What the float8 codes of an activation's gradient are scaled by, found without writing values.

The scale of a column waits for all rows of its group.  So the activation and its gradient are
computed once for the largest magnitudes alone, and again for their codes: that takes less time
than writing values and reading them twice.

A program of this pass is one warp, so nothing in its loop waits for other warps.  It keeps the
largest magnitudes of its rows, two of 16 bits in a word, and writes them at its end; a small
launch finds those of each group among them and makes the scales.

A routing weight's gradient is added up in the order of ``activate_backward``, but for rows of up to
64 columns or at odd addresses.

Letters: T rows, F columns of the pre-activation, I columns of the activation (F = 2 I when
gated, else F = I), G groups.
"""

# What is known when a kernel is compiled has a type that this checker takes for Python's.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.activation import curve_of, halves, prob_of
from backstash.kernels.blocks import locate_block
from backstash.kernels.cast.pairs import larger_pair, magnitudes
from backstash.kernels.cast.scales import scale_of, scaling_of
from backstash.kernels.float8_turned import Prepared
from backstash.kernels.launches import Launcher
from backstash.kernels.reference.activation import curve_name
from backstash.kernels.reference.activation_float8 import Scaling
from backstash.kernels.sizes import ceil_div, next_power_of_2

#: Rows of a block.
BLOCK_ROWS = 128
#: The most columns: the largest magnitudes of all of them are in a warp's registers.
MOST_COLUMNS = 2048
# How many programs share a block.
_TILE: dict[str, Any] = {"B": BLOCK_ROWS, "PARTS": 4}
_AMAX_TILE: dict[str, Any] = {**_TILE, "BI": 256, "num_warps": 1}
_SCALE_TILE: dict[str, Any] = {**_TILE, "BW": 64, "BJ": 16, "BR": 1024, "num_warps": 4}


@triton.jit
def _curve(x, CURVE: tl.constexpr):
    """The value and the slope, as :func:`curve_of` has them to the last bit.

    There the exponential and the quotient take care of results below float32's normal numbers.
    Here the sum that follows the one is not changed by such, and the other is a fourth of 1 over
    a fourth of the sum, which is a normal number always.
    """
    if CURVE == "silu":
        s = tl.inline_asm_elementwise(
            "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; "
            "fma.rn.f32 e, e, 0f3E800000, 0f3E800000; rcp.approx.ftz.f32 e, e; "
            "mul.f32 $0, e, 0f3E800000; }",
            "=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
        value = x * s
        slope = s * (1.0 + x * (1.0 - s))
    else:
        value, slope = curve_of(x, CURVE)
    return value, slope


@triton.jit
def gradients_of(p_da, p_gate, p_up, prob, o_da, o_h, mask, CURVE: tl.constexpr):
    """The activation, the gradients of gate and up, and what the routing weight's is a sum of."""
    da = tl.load(p_da + o_da, mask=mask, other=0).to(tl.float32)
    value, slope = _curve(tl.load(p_gate + o_h, mask=mask, other=0).to(tl.float32), CURVE)
    a = value
    if p_up is not None:
        up = tl.load(p_up + o_h, mask=mask, other=0).to(tl.float32)
        a = value * up
    share = da * a
    if prob is not None:
        da = da * prob[:, None]
        a *= prob[:, None]
    dup = da * value
    if p_up is not None:
        da = da * up
    return a, da * slope, dup, share


@triton.jit
def words_of(x):
    """Neighbours of a row rounded to bfloat16, two in a word."""
    low, high = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;",
        "=r,r,r",
        [low, high],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _larger_magnitude(words, axis: tl.constexpr):
    low, high = magnitudes(tl.reduce(words, axis, larger_pair))
    return tl.maximum(tl.maximum(low, high), 0.0)


@triton.jit
def _amax_kernel(
    p_da,
    p_gate,
    p_up,
    p_prob,
    p_dprob,
    p_words,
    p_row_amax,
    p_table,
    groups,
    rows,
    columns,
    da_stride,
    h_stride,
    prob_stride,
    CURVE: tl.constexpr,
    B: tl.constexpr,
    PARTS: tl.constexpr,
    BI: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """The largest magnitudes of a part of a block's rows, each row's, and the routing weights'."""
    R: tl.constexpr = B // PARTS
    first, end, group = locate_block(p_table, rows, tl.program_id(0) // PARTS, B)
    first += tl.program_id(0) % PARTS * R
    end = tl.minimum(end, first + R)
    if group >= groups:
        # The tail has no gradients; those of its routing weights are zeros, as many read them.
        if p_dprob is not None:
            i_row = first + tl.arange(0, R)
            tl.store(p_dprob + i_row, tl.zeros([R], p_dprob.dtype.element_ty), mask=i_row < end)
    elif first < end:
        zeros = tl.zeros([1, BI // 2], tl.int32)
        of_a = (zeros,) * CHUNKS
        of_gate = (zeros,) * CHUNKS
        of_up = (zeros,) * CHUNKS
        # Two rows are on their way while one is computed.
        for row in tl.range(first, end, num_stages=2):
            i_row = tl.cast(row, tl.int64) + tl.arange(0, 1)
            m_row = i_row < end
            prob = prob_of(p_prob, i_row, m_row, prob_stride)
            dprob = tl.zeros([1, BI], tl.float32)
            of_row = zeros
            new_a = ()
            new_gate = ()
            new_up = ()
            for c in tl.static_range(CHUNKS):
                i_column = c * BI + tl.arange(0, BI)
                mask = m_row[:, None] & (i_column < columns)[None, :]
                o_da = i_row[:, None] * da_stride + i_column[None, :]
                o_h = i_row[:, None] * h_stride + i_column[None, :]
                a, dgate, dup, share = gradients_of(
                    p_da, p_gate, p_up, prob, o_da, o_h, mask, CURVE
                )
                dprob += share
                dgate = words_of(dgate)
                of_row = larger_pair(of_row, dgate)
                new_a += (larger_pair(of_a[c], words_of(a)),)
                new_gate += (larger_pair(of_gate[c], dgate),)
                if p_up is not None:
                    dup = words_of(dup)
                    of_row = larger_pair(of_row, dup)
                    new_up += (larger_pair(of_up[c], dup),)
            of_a = new_a
            of_gate = new_gate
            if p_up is not None:
                of_up = new_up
            if p_prob is not None:
                dprob_T = tl.sum(dprob, 1)
                tl.store(p_dprob + i_row, dprob_T.to(p_dprob.dtype.element_ty), mask=m_row)
            tl.store(p_row_amax + i_row, _larger_magnitude(of_row, 1), mask=m_row)
        words = columns // 2
        p_words += tl.program_id(0).to(tl.int64) * ((3 if p_up is not None else 2) * words)
        for c in tl.static_range(CHUNKS):
            i_word = c * (BI // 2) + tl.arange(0, BI // 2)
            m_word = i_word < words
            tl.store(p_words + i_word, tl.reduce(of_a[c], 0, larger_pair), mask=m_word)
            p_gate_words = p_words + words
            tl.store(p_gate_words + i_word, tl.reduce(of_gate[c], 0, larger_pair), mask=m_word)
            if p_up is not None:
                p_up_words = p_words + 2 * words
                tl.store(p_up_words + i_word, tl.reduce(of_up[c], 0, larger_pair), mask=m_word)


@triton.jit
def _scale_pairs(
    p_words,
    p_scale,
    p_inverse,
    count,
    stride,
    i_word,
    m_word,
    scaling,
    BJ: tl.constexpr,
):
    """The scales of pairs of columns from the largest magnitudes of ``count`` parts of a group."""
    words = tl.zeros([BJ, i_word.shape[0]], tl.int32)
    for j in range(0, count, BJ):
        i_part = j + tl.arange(0, BJ)
        p_part = p_words + i_part.to(tl.int64)[:, None] * stride + i_word[None, :]
        mask = (i_part < count)[:, None] & m_word[None, :]
        words = larger_pair(words, tl.load(p_part, mask=mask, other=0))
    low, high = magnitudes(tl.reduce(words, 0, larger_pair))
    scale, inverse = scale_of(tl.maximum(low, 0.0), *scaling)
    tl.store(p_scale + 2 * i_word, scale, mask=m_word)
    tl.store(p_inverse + 2 * i_word, inverse, mask=m_word)
    scale, inverse = scale_of(tl.maximum(high, 0.0), *scaling)
    tl.store(p_scale + 2 * i_word + 1, scale, mask=m_word)
    tl.store(p_inverse + 2 * i_word + 1, inverse, mask=m_word)


@triton.jit
def _scale_kernel(
    p_words,
    p_row_amax,
    p_ends,
    p_dh_scale,
    p_dh_inverse,
    p_a_scale,
    p_a_inverse,
    p_row_scale,
    p_row_inverse,
    groups,
    rows,
    columns,
    dh_columns,
    dh_largest,
    dh_epsilon,
    value_for_inf,
    dh_exact,
    a_largest,
    a_epsilon,
    a_exact,
    B: tl.constexpr,
    PARTS: tl.constexpr,
    BG: tl.constexpr,
    BW: tl.constexpr,
    BJ: tl.constexpr,
    BR: tl.constexpr,
):
    """The scales of some columns of a group, then those of some rows."""
    words = columns // 2
    chunks = tl.cdiv(words, BW)
    i_program = tl.program_id(0)
    if i_program < groups * chunks:
        group = i_program // chunks
        i_group = tl.arange(0, BG)
        m_group = i_group < groups
        ends = tl.load(p_ends + i_group, mask=m_group, other=0)
        before = tl.load(p_ends + i_group - 1, mask=m_group & (i_group > 0), other=0)
        ends = tl.minimum(tl.maximum(ends, 0), rows).to(tl.int32)
        counts = tl.maximum(ends - tl.minimum(tl.maximum(before, 0), rows).to(tl.int32), 0)
        # Only the last block of a group has parts without rows, and they are its last ones.
        first = tl.sum(tl.where(i_group < group, (counts + B - 1) // B, 0), 0) * PARTS
        R: tl.constexpr = B // PARTS
        count = (tl.sum(tl.where(i_group == group, counts, 0), 0) + R - 1) // R
        stride = words + dh_columns // 2
        p_words += first.to(tl.int64) * stride
        i_word = i_program % chunks * BW + tl.arange(0, BW)
        m_word = i_word < words
        p_scale = p_a_scale + group.to(tl.int64) * columns
        p_inverse = p_a_inverse + group.to(tl.int64) * columns
        given = a_largest, a_epsilon, value_for_inf, a_exact
        _scale_pairs(p_words, p_scale, p_inverse, count, stride, i_word, m_word, given, BJ)
        p_scale = p_dh_scale + group.to(tl.int64) * dh_columns
        p_inverse = p_dh_inverse + group.to(tl.int64) * dh_columns
        given = dh_largest, dh_epsilon, value_for_inf, dh_exact
        p_words += words
        _scale_pairs(p_words, p_scale, p_inverse, count, stride, i_word, m_word, given, BJ)
        if dh_columns > columns:
            p_words += words
            p_scale += columns
            p_inverse += columns
            _scale_pairs(p_words, p_scale, p_inverse, count, stride, i_word, m_word, given, BJ)
    else:
        i_row = (i_program - groups * chunks) * BR + tl.arange(0, BR)
        amax = tl.load(p_row_amax + i_row, mask=i_row < rows, other=0)
        scale, inverse = scale_of(amax, dh_largest, dh_epsilon, value_for_inf, dh_exact)
        tl.store(p_row_scale + i_row, scale, mask=i_row < rows)
        tl.store(p_row_inverse + i_row, inverse, mask=i_row < rows)


_find_magnitudes = Launcher(_amax_kernel)
_make_scales = Launcher(_scale_kernel)


class Scales(NamedTuple):
    """Scales and their inverses, float32, one below the other: ``(2, T)`` and ``(2, G, ...)``."""

    rows: Tensor
    dh: Tensor
    a: Tensor


def gradient_scales(
    da_TI: Tensor,
    h_TF: Tensor,
    prob: tuple[Tensor | None, Tensor | None],
    activation: str,
    groups: tuple[Tensor, Prepared],
    scalings: tuple[Scaling, Scaling],
) -> Scales:
    """Scales of the gradient's rows and columns and of the activation's columns.

    Args:
        da_TI: bfloat16, like ``h_TF``, neighbours side by side.
        h_TF: The pre-activation.
        prob: The routing weights, and what their gradient is written to.
        activation: Its name.
        groups: Their ends in int32, and what was prepared for them.
        scalings: Of the gradient and of the activation.
    """
    (ends_G, (table, blocks, *_)), (prob_T, dprob_T) = groups, prob
    gate_TI, up_TI = halves(h_TF, activation)
    (rows, columns), dh_columns, G = da_TI.shape, h_TF.shape[1], len(ends_G)
    new: dict[str, Any] = {"dtype": torch.float32, "device": da_TI.device}
    amax_T = torch.empty(rows, **new)
    parts, words = blocks * _TILE["PARTS"], (columns + dh_columns) // 2
    words_SW = torch.empty(parts, words, dtype=torch.int32, device=da_TI.device)
    _find_magnitudes(
        parts,
        da_TI,
        gate_TI,
        up_TI,
        prob_T,
        dprob_T,
        words_SW,
        amax_T,
        table,
        G,
        rows,
        columns,
        da_TI.stride(0),
        h_TF.stride(0),
        0 if prob_T is None else prob_T.stride(0),
        CURVE=curve_name(activation),
        CHUNKS=ceil_div(columns, _AMAX_TILE["BI"]),
        **_AMAX_TILE,
    )
    scales = Scales(
        torch.empty(2, rows, **new),
        torch.empty(2, G, dh_columns, **new),
        torch.empty(2, G, columns, **new),
    )
    of_dh, of_a = (
        scaling_of(one.code_dtype, one.epsilon, power_of_two=one.power_of_two) for one in scalings
    )
    programs = G * ceil_div(columns // 2, _SCALE_TILE["BW"]) + ceil_div(rows, _SCALE_TILE["BR"])
    _make_scales(
        programs,
        words_SW,
        amax_T,
        ends_G,
        scales.dh[0],
        scales.dh[1],
        scales.a[0],
        scales.a[1],
        scales.rows[0],
        scales.rows[1],
        G,
        rows,
        columns,
        dh_columns,
        of_dh[0],
        of_dh[1],
        of_dh[2],
        of_dh[3],
        of_a[0],
        of_a[1],
        of_a[3],
        BG=next_power_of_2(G),
        **_SCALE_TILE,
    )
    return scales
