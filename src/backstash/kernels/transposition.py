"""Transposed codes on a GPU: the twin of ``backstash.kernels.reference.transpose``.

A program owns a tile.  It reads whole sectors of rows, turns the tile in shared memory, and
writes whole sectors of what are rows now.  Of pairs it reads even rows and odd ones: the low
halves of both are one row of the result, the high halves the next.

Letters: M rows, K columns, G matrices.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.reference.transpose import PAIRS, check_codes
from backstash.kernels.sizes import ceil_div

_ROWS, _COLUMNS = 64, 128


@triton.jit
def _transpose_kernel(
    p_codes,
    p_turned,
    rows,
    columns,
    matrix_stride,
    row_stride,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    strips, chunks = tl.cdiv(rows, BM), tl.cdiv(columns, BK)
    i_tile = tl.program_id(0) % (strips * chunks)
    i_matrix = (tl.program_id(0) // (strips * chunks)).to(tl.int64)
    i_row = (i_tile // chunks).to(tl.int64) * BM + tl.arange(0, BM)
    i_column = (i_tile % chunks).to(tl.int64) * BK + tl.arange(0, BK)
    p_codes += i_matrix * matrix_stride
    p_turned += i_matrix * rows * columns
    mask = (i_row < rows)[:, None] & (i_column < columns)[None, :]
    codes = tl.load(p_codes + i_row[:, None] * row_stride + i_column[None, :], mask=mask)
    p_tile = p_turned + i_column[:, None] * rows + i_row[None, :]
    tl.store(p_tile, tl.trans(codes), mask=tl.trans(mask))


@triton.jit
def _transpose_pairs_kernel(
    p_pairs,
    p_turned,
    rows,
    columns,
    matrix_stride,
    row_stride,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    turned_columns = tl.cdiv(rows, 2)
    strips, chunks = tl.cdiv(turned_columns, BM), tl.cdiv(columns, BK)
    i_tile = tl.program_id(0) % (strips * chunks)
    i_matrix = (tl.program_id(0) // (strips * chunks)).to(tl.int64)
    i_row = (i_tile // chunks).to(tl.int64) * BM + tl.arange(0, BM)
    i_column = (i_tile % chunks).to(tl.int64) * BK + tl.arange(0, BK)
    p_even = (
        p_pairs + i_matrix * matrix_stride + 2 * i_row[:, None] * row_stride + i_column[None, :]
    )
    m_column = (i_column < columns)[None, :]
    even = tl.load(p_even, mask=(2 * i_row < rows)[:, None] & m_column, other=0)
    m_odd = (2 * i_row + 1 < rows)[:, None] & m_column
    odd = tl.load(p_even + row_stride, mask=m_odd, other=0)
    p_turned += i_matrix * 2 * columns * turned_columns
    p_low = p_turned + 2 * i_column[:, None] * turned_columns + i_row[None, :]
    mask = (i_column < columns)[:, None] & (i_row < turned_columns)[None, :]
    tl.store(p_low, tl.trans((even & 15) | (odd << 4)), mask=mask)
    tl.store(p_low + turned_columns, tl.trans((even >> 4) | (odd & 240)), mask=mask)


def transpose_codes(codes: Tensor) -> Tensor:
    """Codes ``(M, K)`` as ``(K, M)``, or ``(G, M, K)`` as ``(G, K, M)``, in fresh memory.

    As ``float4_e2m1fn_x2`` they are pairs, ``(M, K / 2)`` bytes as ``(K, ceil(M / 2))``.

    Raises:
        ShapeError: There are not two or three dimensions, or a code is more than a byte.
    """
    check_codes(codes)
    dtype, codes = codes.dtype, codes.view(torch.uint8)
    # Neighbours of a row side by side; matrices and rows may lie anywhere.
    codes = codes if codes.stride(-1) == 1 else codes.contiguous()
    *matrices, rows, columns = codes.shape
    shape, kernel = (columns, rows), _transpose_kernel
    if dtype is PAIRS:
        shape, kernel = (2 * columns, ceil_div(rows, 2)), _transpose_pairs_kernel
    turned = torch.empty(*matrices, *shape, dtype=torch.uint8, device=codes.device)
    programs = turned.shape[:-2].numel() * ceil_div(shape[1], _ROWS)
    programs *= ceil_div(columns, _COLUMNS)
    tile: dict[str, Any] = {"BM": _ROWS, "BK": _COLUMNS}
    if programs:
        kernel[(programs,)](
            codes,
            turned,
            rows,
            columns,
            codes.stride(0) if codes.ndim == 3 else 0,
            codes.stride(-2),
            **tile,
        )
    return turned.view(dtype)
