"""Rows of tokens to rows of experts and back on a GPU, each in one pass over the rows.

A token's copies are far apart in the experts' order, so by the time that the next one is made its
row has left the cache.  A few columns of all tokens fit into it: copies are made a strip of columns
at a time, and memory is read once.

The twins of ``backstash.kernels.reference.permute``: the sum over a token's copies runs over
ascending copies in float32, so it is the reference's to the last bit.

Letters: T tokens, K experts a token, R rows, H features.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.blocks import unit_columns
from backstash.kernels.launches import Launcher
from backstash.kernels.reference.permute import check_permute, check_unpermute
from backstash.kernels.sizes import ceil_div, next_power_of_2

_COLUMNS = 1024
# Rows of a tile of copies, and at most so many bytes and columns of them; of narrow rows more.
_ROWS, _MOST_ROWS = 16, 64
_STRIP_BYTES, _STRIP_COLUMNS = 512, 256


@triton.jit
def _permute_kernel(
    p_x, p_source, p_y, rows, columns, x_stride, BR: tl.constexpr, BH: tl.constexpr
):
    # Strip after strip: programs run in the order of their numbers.
    blocks = tl.cdiv(rows, BR)
    i_row = (tl.program_id(0) % blocks).to(tl.int64) * BR + tl.arange(0, BR)
    i_column = (tl.program_id(0) // blocks) * BH + tl.arange(0, BH)
    m_row = i_row < rows
    i_source = tl.load(p_source + i_row, mask=m_row, other=0).to(tl.int64)
    mask = m_row[:, None] & (i_column < columns)[None, :]
    x = tl.load(p_x + i_source[:, None] * x_stride + i_column[None, :], mask=mask, other=0)
    tl.store(p_y + i_row[:, None] * columns + i_column[None, :], x, mask=mask)


@triton.jit
def _unpermute_kernel(
    p_y,
    p_slots,
    p_valid,
    p_sum,
    tokens,
    rows,
    columns,
    y_stride,
    sum_stride,
    HAS_VALID: tl.constexpr,
    K: tl.constexpr,
    WIDE: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    chunks = tl.cdiv(columns, BH)
    i_token = (tl.program_id(0) // chunks).to(tl.int64) * BT + tl.arange(0, BT)
    i_column = (tl.program_id(0) % chunks) * BH + tl.arange(0, BH)
    m_token = i_token < tokens
    mask = m_token[:, None] & (i_column < columns)[None, :]
    total = tl.zeros([BT, BH], WIDE)
    for k in tl.static_range(K):  # pyright: ignore[reportGeneralTypeIssues]
        i_slot = tl.load(p_slots + i_token * K + k, mask=m_token, other=0).to(tl.int64)
        p_row = p_y + i_slot[:, None] * y_stride + i_column[None, :]
        m_row = mask
        if HAS_VALID:
            m_row = mask & (i_slot < tl.minimum(tl.load(p_valid), rows))[:, None]
        total += tl.load(p_row, mask=m_row, other=0).to(WIDE)
    p_token = p_sum + i_token[:, None] * sum_stride + i_column[None, :]
    tl.store(p_token, total.to(p_sum.dtype.element_ty), mask=mask)


_copy_rows = Launcher(_permute_kernel)
_add_up = Launcher(_unpermute_kernel)


def permute(x_TH: Tensor, source_R: Tensor) -> Tensor:
    """Copy each row's token to it: ``x_RH[r] = x_TH[source_R[r]]``."""
    check_permute(x_TH, source_R)
    x_TH = unit_columns(x_TH)
    rows, columns = source_R.shape[0], x_TH.shape[1]
    x_RH = torch.empty(rows, columns, dtype=x_TH.dtype, device=x_TH.device)
    most = min(_STRIP_COLUMNS, _STRIP_BYTES // x_TH.itemsize)
    width = _width(columns, most)
    tile: dict[str, Any] = {"BR": min(_MOST_ROWS, _ROWS * most // width), "BH": width}
    programs = ceil_div(rows, tile["BR"]) * ceil_div(columns, width)
    if programs:
        _copy_rows(
            programs, x_TH, source_R.contiguous(), x_RH, rows, columns, x_TH.stride(0), **tile
        )
    return x_RH


def unpermute(
    y_RH: Tensor, slots_TK: Tensor, valid: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Add up the rows of each token: ``y_TH[t] = sum_k y_RH[slots_TK[t, k]]``."""
    check_unpermute(y_RH, slots_TK, out)
    y_RH = unit_columns(y_RH)
    (tokens, copies), columns = slots_TK.shape, y_RH.shape[1]
    y_TH = out
    if y_TH is None:
        y_TH = torch.empty(tokens, columns, dtype=y_RH.dtype, device=y_RH.device)
    tile: dict[str, Any] = {
        "HAS_VALID": valid is not None,
        "K": copies,
        "WIDE": tl.float64 if y_RH.dtype is torch.float64 else tl.float32,
        "BT": 1,
        "BH": _width(columns, _COLUMNS),
    }
    programs = tokens * ceil_div(columns, tile["BH"])
    if programs:
        _add_up(
            programs,
            y_RH,
            slots_TK.contiguous(),
            valid,
            y_TH,
            tokens,
            y_RH.shape[0],
            columns,
            y_RH.stride(0),
            y_TH.stride(0),
            **tile,
        )
    return y_TH


def _width(columns: int, most: int) -> int:
    return min(most, max(16, next_power_of_2(columns)))
