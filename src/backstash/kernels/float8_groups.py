"""Products of float8 codes over groups of rows on GPUs without kernels of their own for them.

A program owns a tile of the result.  Both operands have what is added up over last in memory,
so a tile of codes goes from memory to the matrix unit as it is, E4M3 and E5M2 alike, and the
scales are multiplied onto the finished sum.  The tail is written as zeros and never read, and
the weight gradient of an empty group adds up nothing.

Letters: as in :mod:`backstash.kernels.quantized_matmul.places`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.blocks import block_count, block_table
from backstash.kernels.quantized_matmul.places import group_tile, load_codes, row_tile
from backstash.kernels.reference.float8_mm import Scaled
from backstash.kernels.sizes import ceil_div
from backstash.kernels.tiles import groups_by_size

_BM = 128
# A step's own sum takes as many registers again, so the tile is half as wide then.
_TILE: dict[str, Any] = {"BM": _BM, "BN": 128, "BK": 128, "num_warps": 8, "num_stages": 4}
_FAST_TILE: dict[str, Any] = {**_TILE, "BN": 256, "num_stages": 3}


@triton.jit
def _add_up(p_a, p_b, a_ld, b_ld, m_m, m_n, J, FAST: tl.constexpr, BM, BN, BK: tl.constexpr):
    """The product of BM lines of a and BN of b, along J.

    A unit's own register holds one step of 128 products, unless it may hold all.
    """
    i_k = tl.arange(0, BK)
    total = tl.zeros([BM, BN], tl.float32)
    for k in range(0, J, BK):
        a = load_codes(p_a + k, a_ld, m_m, i_k < J - k, False, BM, BK)
        b = load_codes(p_b + k, b_ld, m_n, i_k < J - k, False, BN, BK)
        if FAST:
            total = tl.dot(a, b.T, total)
        else:
            total += tl.dot(a, b.T)
    return total


@triton.jit(do_not_specialize=["groups", "rows"])
def _rows_kernel(
    p_a,
    p_a_scale,
    p_b,
    p_b_scale,
    p_out,
    p_table,
    groups,
    rows,
    length,
    columns,
    FAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    i_m, i_n = tl.arange(0, BM), tl.arange(0, BN)
    first, left, group, n0, J = row_tile(
        p_table, tl.program_id(0), groups, rows, length, columns, BM, BN
    )
    # The tail adds up nothing; nor are its scales read.
    m_m, m_n = i_m < tl.where(J > 0, left, 0), i_n < columns - n0
    line = group * columns + n0
    total = _add_up(
        p_a + first * length, p_b + line * length, length, length, m_m, m_n, J, FAST, BM, BN, BK
    )
    a_scale = tl.load(p_a_scale + first + i_m, mask=m_m, other=0.0)
    b_scale = tl.load(p_b_scale + line + i_n, mask=m_n, other=0.0)
    total = total * a_scale[:, None] * b_scale[None, :]
    p_tile = p_out + first * columns + n0 + i_m[:, None] * columns + i_n[None, :]
    mask = (i_m < left)[:, None] & m_n[None, :]
    tl.store(p_tile, total.to(p_out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _columns_kernel(
    p_a,
    p_a_scale,
    p_b,
    p_b_scale,
    p_out,
    p_table,
    rows,
    M,
    columns,
    ld,
    FAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    i_m, i_n = tl.arange(0, BM), tl.arange(0, BN)
    first, J, group, m0, n0 = group_tile(p_table, tl.program_id(0), rows, M, columns, BM, BN)
    # Groups begin and end at whole units; so written, the compiler knows it and loads wide.
    first, J = first // 16 * 16, J // 16 * 16
    group, m_m, m_n = tl.cast(group, tl.int64), i_m < M - m0, i_n < columns - n0
    # A line is as long as the buffer: so are the steps inside a tile, in as many bits.
    ld = tl.cast(ld, tl.int64)
    p_a += m0 * ld + first
    p_b += n0 * ld + first
    total = _add_up(p_a, p_b, ld, ld, m_m, m_n, J, FAST, BM, BN, BK)
    a_scale = tl.load(p_a_scale + group * M + m0 + i_m, mask=m_m, other=0.0)
    b_scale = tl.load(p_b_scale + group * columns + n0 + i_n, mask=m_n, other=0.0)
    total = total * a_scale[:, None] * b_scale[None, :]
    p_tile = p_out + (group * M + m0) * columns + n0 + i_m[:, None] * columns + i_n[None, :]
    mask = m_m[:, None] & m_n[None, :]
    tl.store(p_tile, total.to(p_out.dtype.element_ty), mask=mask)


def mm_rows(
    a: Scaled, b: Scaled, ends_G: Tensor, dtype: torch.dtype, *, fast_accumulation: bool
) -> Tensor:
    """Each row times its own group's ``b^T``: ``(T, C)``; the tail is zeros."""
    (rows, length), (groups, columns, _) = a.codes.shape, b.codes.shape
    out_TC = torch.empty(rows, columns, dtype=dtype, device=a.codes.device)
    tile = _FAST_TILE if fast_accumulation and columns > _TILE["BN"] else _TILE
    programs = block_count(rows, ends_G, _BM) * ceil_div(columns, tile["BN"])
    _rows_kernel[(programs,)](
        a.codes.contiguous(),
        a.scale_inv,
        b.codes.contiguous(),
        b.scale_inv,
        out_TC,
        block_table(ends_G, rows, _BM),
        groups,
        rows,
        length,
        columns,
        FAST=fast_accumulation,  # pyright: ignore[reportArgumentType]
        **tile,
    )
    return out_TC


def mm_columns(dy: Scaled, x: Scaled, padded_ends_G: Tensor, dtype: torch.dtype) -> Tensor:
    """``dy x^T`` over each group's columns: ``(G, N, K)``; zeros for an empty group."""
    (M, padded), columns, groups = dy.codes.shape, len(x.codes), len(padded_ends_G)
    out_GMC = torch.empty(groups, M, columns, dtype=dtype, device=x.codes.device)
    tiles = groups * ceil_div(M, _BM) * ceil_div(columns, _TILE["BN"])
    _columns_kernel[(tiles,)](
        dy.codes,
        dy.scale_inv,
        x.codes,
        x.scale_inv,
        out_GMC,
        groups_by_size(padded_ends_G, padded),
        padded,
        M,
        columns,
        padded,
        FAST=False,  # pyright: ignore[reportArgumentType]
        **_TILE,
    )
    return out_GMC
