"""Activations on a GPU, each in one pass: the twins of ``backstash.kernels.reference.activation``.

Forward reads the pre-activation and writes the activation.  Backward reads both gradients'
sources once, computes the activation again on the way and writes it if somebody reads it, and
adds up each row's routing weight's gradient in the same program, so its order never changes.
float64 goes to the
reference: it is what gradients are checked in, not what anybody trains in.

Letters: T rows, F columns of the pre-activation, I columns of the activation.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.blocks import unit_columns
from backstash.kernels.launches import Launcher
from backstash.kernels.paged_rows import Lookup, find_values, is_in_chunks, lookup_of, valid_rows
from backstash.kernels.reference import activation as reference
from backstash.kernels.reference.activation import (
    ACTIVATIONS,
    ActivationGradients,
    check_activation,
    curve_name,
)
from backstash.kernels.reference.paged_rows import InPages, PagedRows
from backstash.kernels.reference.slabs import Slabs
from backstash.kernels.sizes import ceil_div, next_power_of_2
from backstash.kernels.slabs import find_slab, padded_rows
from backstash.kernels.slabs import lookup_of as slabs_of

_ROWS = 8
_COLUMNS = 256


@triton.jit
def curve_of(x, CURVE: tl.constexpr):
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
def prob_of(p_prob, i_row, m_row, prob_stride):
    """The routing weights of some rows; None if there are none."""
    prob = None
    if p_prob is not None:
        prob = tl.load(p_prob + i_row * prob_stride, mask=m_row, other=0).to(tl.float32)
    return prob


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
    p_ends,
    groups,
    CURVE: tl.constexpr,
    BT: tl.constexpr,
    BI: tl.constexpr,
):
    chunks = tl.cdiv(columns, BI)
    i_row = (tl.program_id(0) // chunks).to(tl.int64) * BT + tl.arange(0, BT)
    if p_ends is not None:
        rows = tl.minimum(tl.load(p_ends + groups - 1), rows)
    i_column = (tl.program_id(0) % chunks) * BI + tl.arange(0, BI)
    mask = (i_row < rows)[:, None] & (i_column < columns)[None, :]
    o_h = i_row[:, None] * h_stride + i_column[None, :]
    gate = tl.load(p_gate + o_h, mask=mask, other=0).to(tl.float32)
    value, _ = curve_of(gate, CURVE)
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
    p_ends,
    groups,
    h_pages,
    h_host,
    prob_pages,
    prob_host,
    h_slabs,
    CURVE: tl.constexpr,
    BT: tl.constexpr,
    BI: tl.constexpr,
    H_PAGE: tl.constexpr,
    PROB_PAGE: tl.constexpr,
    BG: tl.constexpr,
    H_SLAB: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    valid = rows
    if p_ends is not None:
        valid = tl.minimum(tl.load(p_ends + groups - 1), rows)
    if H_PAGE:
        stashed, in_pages = valid_rows(h_pages, h_stride)
        valid = tl.minimum(stashed, valid)
    if p_ends is not None or H_PAGE:  # known when it is compiled # noqa: SIM102
        # The tail has no gradients; those of its routing weights are zeros, as many read them.
        if tl.program_id(0) * BT >= valid:
            if p_dprob is not None:
                zeros = tl.zeros([BT], p_dprob.dtype.element_ty)
                tl.store(p_dprob + i_row, zeros, mask=i_row < rows)
            return
    m_row = i_row < valid
    m_h = i_row < in_pages if H_PAGE else m_row
    if H_SLAB:
        i_padded = padded_rows(h_slabs, i_row, m_row, p_ends, groups, rows, BG)
    dprob = tl.zeros([BT, BI], tl.float32)
    prob = tl.zeros([BT], tl.float32)
    if PROB_PAGE:
        _, in_pages = valid_rows(prob_pages, 1)
        m_prob = m_row & (i_row < in_pages)
        p_weight = find_values(prob_pages, prob_host, i_row, m_prob, PROB_PAGE)
        prob = tl.load(p_weight, mask=m_prob, other=0).to(tl.float32)
    elif p_prob is not None:
        prob = tl.load(p_prob + i_row * prob_stride, mask=m_row, other=0).to(tl.float32)
    for first in range(0, columns, BI):
        i_column = first + tl.arange(0, BI)
        mask = m_row[:, None] & (i_column < columns)[None, :]
        if H_PAGE:
            # A chunk of columns lies in one page: it is looked up once.
            mask_h = m_h[:, None] & (i_column < columns)[None, :]
            i_chunk = tl.arange(0, BI)[None, :]
            o_gate = i_row * h_stride + first
            p_gates = find_values(h_pages, h_host, o_gate, m_h, H_PAGE)[:, None] + i_chunk
            if p_dup is not None:
                o_up = o_gate + columns
                p_ups = find_values(h_pages, h_host, o_up, m_h, H_PAGE)[:, None] + i_chunk
        elif H_SLAB:
            i_chunk = tl.arange(0, BI)[None, :]
            p_row, is_there = find_slab(h_slabs, i_padded, first, H_SLAB)
            mask_h = (m_row & is_there)[:, None]
            p_gates = p_row[:, None] + i_chunk
            if p_dup is not None:
                p_row, _ = find_slab(h_slabs, i_padded, columns + first, H_SLAB)
                p_ups = p_row[:, None] + i_chunk
        else:
            mask_h = mask
            o_h = i_row[:, None] * h_stride + i_column[None, :]
            p_gates = p_gate + o_h
            if p_dup is not None:
                p_ups = p_up + o_h
        o_dh = i_row[:, None] * dh_stride + i_column[None, :]
        o_da = i_row[:, None] * da_stride + i_column[None, :]
        da = tl.load(p_da + o_da, mask=mask, other=0).to(tl.float32)
        gate = tl.load(p_gates, mask=mask_h, other=0).to(tl.float32)
        value, slope = curve_of(gate, CURVE)
        plain = value
        if p_dup is not None:
            up = tl.load(p_ups, mask=mask_h, other=0).to(tl.float32)
            plain = value * up
        if p_dprob is not None:
            dprob += da * plain
            da = da * prob[:, None]
            plain *= prob[:, None]
        # A thread stores where it has loaded: gradients may take the place of what they are of.
        if p_a is not None:
            o_a = i_row[:, None] * a_stride + i_column[None, :]
            tl.store(p_a + o_a, plain.to(p_a.dtype.element_ty), mask=mask)
        if p_dup is not None:
            tl.store(p_dup + o_dh, (da * value).to(p_dup.dtype.element_ty), mask=mask)
            da = da * up
        tl.store(p_dgate + o_dh, (da * slope).to(p_dgate.dtype.element_ty), mask=mask)
    if p_dprob is not None:
        dprob_T = tl.sum(dprob, 1)
        tl.store(p_dprob + i_row, dprob_T.to(p_dprob.dtype.element_ty), mask=i_row < rows)


_activate = Launcher(_activate_kernel)
_activate_backward = Launcher(_activate_backward_kernel)


def activate(
    h_TF: Tensor, prob_T: Tensor | None, activation: str, ends_G: Tensor | None = None
) -> Tensor:
    """Apply ``activation`` to each row and multiply it by the row's weight, if there is one.

    With the ends of groups, rows of the tail are not written.
    """
    if h_TF.dtype is torch.float64:
        return reference.activate(h_TF, prob_T, activation, ends_G)
    check_activation(h_TF, prob_T, activation)
    h_TF = unit_columns(h_TF)
    gate_TI, up_TI = halves(h_TF, activation)
    rows, columns = gate_TI.shape
    a_TI = torch.empty(rows, columns, dtype=h_TF.dtype, device=h_TF.device)
    tile = _tile(columns, activation)
    programs = ceil_div(rows, _ROWS) * ceil_div(columns, tile["BI"])
    if programs:
        _activate(
            programs,
            gate_TI,
            up_TI,
            prob_T,
            a_TI,
            rows,
            columns,
            h_TF.stride(0),
            0 if prob_T is None else prob_T.stride(0),
            ends_G,
            0 if ends_G is None else ends_G.shape[0],
            **tile,
        )
    return a_TI


def activate_backward(
    da_TI: Tensor,
    h_TF: Tensor | InPages,
    prob_T: Tensor | PagedRows | None,
    activation: str,
    into: ActivationGradients | None = None,
    ends_G: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Give the gradients of :func:`activate`, with the activation computed again from ``h_TF``.

    What is in pages is read there.  Of rows of the tail, and of those that are in no page, only
    the gradients of the routing weights are written, and are zeros.
    """
    if h_TF.dtype is torch.float64:
        return reference.activate_backward(da_TI, h_TF, prob_T, activation, into, ends_G)
    check_activation(h_TF, prob_T, activation, da_TI)
    da_TI = unit_columns(da_TI)
    h_pages, h_host = _lookup(None if isinstance(h_TF, Slabs) else h_TF)
    prob_pages, prob_host = _lookup(prob_T)
    gate_TI = up_TI = None
    if isinstance(h_TF, InPages):
        h_stride = h_TF.shape[1]
        ends_G = h_TF.ends_G if isinstance(h_TF, Slabs) else ends_G
    else:
        h_TF = unit_columns(h_TF)
        gate_TI, up_TI = halves(h_TF, activation)
        h_stride = h_TF.stride(0)
    dh_TF, dprob_T, a_TI = into or _new_gradients(da_TI, h_TF, prob_T)
    dgate_TI, dup_TI = halves(dh_TF, activation)
    rows, columns = dgate_TI.shape
    if rows and columns:
        _activate_backward(
            ceil_div(rows, _ROWS),
            da_TI,
            gate_TI,
            up_TI,
            prob_T if isinstance(prob_T, Tensor) else None,
            dgate_TI,
            dup_TI,
            dprob_T,
            a_TI,
            rows,
            columns,
            da_TI.stride(0),
            h_stride,
            dh_TF.stride(0),
            0 if a_TI is None else a_TI.stride(0),
            prob_T.stride(0) if isinstance(prob_T, Tensor) else 0,
            ends_G,
            0 if ends_G is None else ends_G.shape[0],
            h_pages,
            h_host,
            prob_pages,
            prob_host,
            slabs_of(h_TF) if isinstance(h_TF, Slabs) else None,
            H_PAGE=_values_a_page(None if isinstance(h_TF, Slabs) else h_TF),
            PROB_PAGE=_values_a_page(prob_T),
            **_tile_of(h_TF, columns, activation),
        )
    elif dprob_T is not None:
        dprob_T.zero_()  # rows without columns add up to nothing
    return dh_TF, dprob_T


def activates_pages(paged: InPages, activation: str) -> bool:
    """Does :func:`activate_backward` read this pre-activation, or these weights, where they are?"""
    if isinstance(paged, Slabs):
        return True
    if paged.dtype is torch.float64 or paged.dtype.itemsize > paged.page_bytes:
        return False
    if len(paged.shape) == 1:
        return True
    columns = paged.shape[1] // 2 if ACTIVATIONS[activation] else paged.shape[1]
    chunk = _tile(columns, activation)["BI"]
    return len(paged.shape) == 2 and columns % chunk == 0 and is_in_chunks(paged, chunk)


def _lookup(value: Tensor | PagedRows | None) -> Lookup | tuple[None, None]:
    return lookup_of(value) if isinstance(value, PagedRows) else (None, None)


def _values_a_page(value: Tensor | PagedRows | None) -> int:
    return value.page_bytes // value.dtype.itemsize if isinstance(value, PagedRows) else 0


def _tile_of(h_TF: Tensor | InPages, columns: int, activation: str) -> dict[str, Any]:
    tile = _tile(columns, activation)
    if not isinstance(h_TF, Slabs):
        return {**tile, "BG": 0, "H_SLAB": 0}
    groups, width = next_power_of_2(len(h_TF.ends_G)), h_TF.pages().shape[1]
    return {**tile, "BG": groups, "H_SLAB": width}


def _new_gradients(
    da_TI: Tensor, h_TF: Tensor | InPages, prob_T: Tensor | PagedRows | None
) -> ActivationGradients:
    # Rows are side by side, however those of the values lie.
    dh_TF = da_TI.new_empty(h_TF.shape, dtype=h_TF.dtype)
    dprob_T = None if prob_T is None else da_TI.new_empty(prob_T.shape, dtype=prob_T.dtype)
    return ActivationGradients(dh_TF, dprob_T, None)


def halves(h_TF: Tensor, activation: str) -> tuple[Tensor, Tensor | None]:
    """The gate and what it is multiplied with; all of it, and None, where nothing is gated."""
    if not ACTIVATIONS[activation]:
        return h_TF, None
    columns = h_TF.shape[1] // 2
    return h_TF[:, :columns], h_TF[:, columns:]


@functools.cache
def _tile(columns: int, activation: str) -> dict[str, Any]:
    return {
        "CURVE": curve_name(activation),
        "BT": _ROWS,
        "BI": min(_COLUMNS, max(16, next_power_of_2(columns))),
    }
