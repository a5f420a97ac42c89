"""Transposed codes on a GPU: the twin of ``backstash.kernels.reference.transpose``.

A program owns a tile.  It reads whole sectors of rows, turns the tile in shared memory, and
writes whole sectors of what are rows now.

Letters: M rows, K columns, G matrices.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.reference.transpose import check_codes

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


def transpose_codes(codes: Tensor) -> Tensor:
    """One-byte codes ``(M, K)`` as ``(K, M)``, or ``(G, M, K)`` as ``(G, K, M)``, in fresh memory.

    Raises:
        ShapeError: There are not two or three dimensions, or a code is more than a byte.
    """
    check_codes(codes)
    # Neighbours of a row side by side; matrices and rows may lie anywhere.
    codes = codes if codes.stride(-1) == 1 else codes.contiguous()
    turned = torch.empty_like(codes.mT, memory_format=torch.contiguous_format)
    rows, columns = codes.shape[-2:]
    programs = codes.shape[:-2].numel() * triton.cdiv(rows, _ROWS) * triton.cdiv(columns, _COLUMNS)
    tile: dict[str, Any] = {"BM": _ROWS, "BK": _COLUMNS}
    if programs:
        _transpose_kernel[(programs,)](
            codes.view(torch.uint8),
            turned.view(torch.uint8),
            rows,
            columns,
            codes.stride(0) if codes.ndim == 3 else 0,
            codes.stride(-2),
            **tile,
        )
    return turned
