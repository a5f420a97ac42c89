"""Grouped products in any dtype on any GPU, plainly: a program for each tile of the result.

Every row and every group is the work of some program, so nothing stays unwritten, and every
sum is added up in one order by one program.  Sums are float32, of float64 values float64; the
products of float32 values are not rounded to fewer bits on the way.

Letters: T rows, J columns of the rows, C columns of the result, N and K columns of the operands
of a weight gradient, G groups.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.blocks import block_count, block_table, locate_block
from backstash.kernels.sizes import ceil_div
from backstash.kernels.tiles import groups_by_size

_ROWS = 32
_COLUMNS = 64
_INNER = 32


@triton.jit
def _rows_kernel(
    p_a,
    p_b,
    p_y,
    p_table,
    groups,
    rows,
    inner,
    columns,
    a_row,
    a_inner,
    b_group,
    b_inner,
    b_column,
    B: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    WIDE: tl.constexpr,
):
    chunks = tl.cdiv(columns, BN)
    i_column = (tl.program_id(0) % chunks) * BN + tl.arange(0, BN).to(tl.int64)
    first, end, group = locate_block(p_table, rows, tl.program_id(0) // chunks, B)
    i_row = first + tl.arange(0, B).to(tl.int64)
    m_row, m_column = i_row < end, i_column < columns
    total = tl.zeros([B, BN], WIDE)
    if (group < groups) & (first < end):
        p_rows = p_a + i_row[:, None] * a_row
        p_matrix = p_b + tl.cast(group, tl.int64) * b_group + i_column[None, :] * b_column
        for k in range(0, inner, BK):
            i_inner = k + tl.arange(0, BK).to(tl.int64)
            m_inner = i_inner < inner
            m_a, m_b = m_row[:, None] & m_inner[None, :], m_inner[:, None] & m_column[None, :]
            a = tl.load(p_rows + i_inner[None, :] * a_inner, mask=m_a, other=0)
            b = tl.load(p_matrix + i_inner[:, None] * b_inner, mask=m_b, other=0)
            total = tl.dot(a, b, total, input_precision="ieee", out_dtype=WIDE)
    p_tile = p_y + i_row[:, None] * columns + i_column[None, :]
    tl.store(p_tile, total.to(p_y.dtype.element_ty), mask=m_row[:, None] & m_column[None, :])


@triton.jit
def _columns_kernel(
    p_a,
    p_b,
    p_dw,
    p_table,
    high,
    wide,
    a_row,
    a_column,
    b_row,
    b_column,
    B: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    WIDE: tl.constexpr,
):
    chunks = tl.cdiv(wide, BN)
    tiles = tl.cdiv(high, B) * chunks
    p_entry = p_table + tl.program_id(0) // tiles * 4
    start, end, group = tl.load(p_entry), tl.load(p_entry + 1), tl.load(p_entry + 2)
    place = tl.program_id(0) % tiles
    i_high = (place // chunks) * B + tl.arange(0, B).to(tl.int64)
    i_wide = (place % chunks) * BN + tl.arange(0, BN).to(tl.int64)
    m_high, m_wide = i_high < high, i_wide < wide
    total = tl.zeros([B, BN], WIDE)
    for first in range(start, end, BK):
        i_row = first + tl.arange(0, BK).to(tl.int64)
        m_row = i_row < end
        p_left = p_a + i_high[:, None] * a_column + i_row[None, :] * a_row
        p_right = p_b + i_row[:, None] * b_row + i_wide[None, :] * b_column
        a = tl.load(p_left, mask=m_high[:, None] & m_row[None, :], other=0)
        b = tl.load(p_right, mask=m_row[:, None] & m_wide[None, :], other=0)
        total = tl.dot(a, b, total, input_precision="ieee", out_dtype=WIDE)
    p_tile = p_dw + (tl.cast(group, tl.int64) * high + i_high[:, None]) * wide + i_wide[None, :]
    tl.store(p_tile, total.to(p_dw.dtype.element_ty), mask=m_high[:, None] & m_wide[None, :])


def multiply_rows(a_TJ: Tensor, b_GJC: Tensor, ends_G: Tensor) -> Tensor:
    """Multiply each row from the right by its group's matrix; zeros in the tail."""
    (T, J), C = a_TJ.shape, b_GJC.shape[2]
    y_TC = torch.empty(T, C, dtype=a_TJ.dtype, device=a_TJ.device)
    programs = block_count(T, ends_G, _ROWS) * ceil_div(C, _COLUMNS)
    _rows_kernel[(programs,)](
        a_TJ,
        b_GJC,
        y_TC,
        block_table(ends_G, T, _ROWS),
        ends_G.shape[0],
        T,
        J,
        C,
        a_TJ.stride(0),
        a_TJ.stride(1),
        b_GJC.stride(0),
        b_GJC.stride(1),
        b_GJC.stride(2),
        **_tile(a_TJ),
    )
    return y_TC


def multiply_columns(dy_TN: Tensor, x_TK: Tensor, ends_G: Tensor) -> Tensor:
    """``dw_GNK[g] = dy[g].T @ x[g]``, zeros for an empty group."""
    groups, (T, N), K = ends_G.shape[0], dy_TN.shape, x_TK.shape[1]
    dw_GNK = torch.empty(groups, N, K, dtype=x_TK.dtype, device=x_TK.device)
    programs = groups * ceil_div(N, _ROWS) * ceil_div(K, _COLUMNS)
    _columns_kernel[(programs,)](
        dy_TN,
        x_TK,
        dw_GNK,
        groups_by_size(ends_G, T),
        N,
        K,
        dy_TN.stride(0),
        dy_TN.stride(1),
        x_TK.stride(0),
        x_TK.stride(1),
        **_tile(x_TK),
    )
    return dw_GNK


def _tile(x: Tensor) -> dict[str, Any]:
    wide = tl.float64 if x.dtype is torch.float64 else tl.float32
    return {"B": _ROWS, "BN": _COLUMNS, "BK": _INNER, "WIDE": wide}
