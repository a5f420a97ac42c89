"""Float8 with a scale for each row or column on a GPU: the twins of the reference.

A program of the row kernel owns whole rows: it finds their largest values, and when it reads
the rows again to cast them they are still in the cache.  The largest value of a column of a
group needs all rows first, so that takes two passes over memory.

Letters: M rows, K columns, G groups.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.blocks import (
    block_count,
    block_table,
    group_number,
    locate_block,
    new_bytes,
    unit_columns,
)
from backstash.kernels.cast.scaled import (
    dequantize_scaled,
    kept_bits,
    quantize_scaled,
    scale_from_amax,
    scale_of,
)
from backstash.kernels.reference.cast import FLOAT32_MAX

_ROWS = 2
_COLUMNS = 2048
# Rows of a group that one program takes the largest values of: few programs, few atomics.
_BLOCK = 128
_BLOCK_COLUMNS = 128


@triton.jit
def _quantize_rows_kernel(
    p_x,
    p_codes,
    p_scale_inv,
    rows,
    columns,
    row_stride,
    largest,
    epsilon,
    value_for_inf,
    kept,
    B: tl.constexpr,
    BK: tl.constexpr,
):
    """Codes and inverse scales of B rows; without codes, their largest values alone."""
    i_row = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    m_row = i_row < rows
    p_x += i_row[:, None] * row_stride
    magnitude = tl.zeros([B, BK], tl.float32)
    for first in range(0, columns, BK):
        i_column = first + tl.arange(0, BK)
        mask = m_row[:, None] & (i_column < columns)[None, :]
        x = tl.load(p_x + i_column[None, :], mask=mask, other=0).to(tl.float32)
        # The maximum with a NaN is the other operand: a NaN does not count.
        magnitude = tl.maximum(magnitude, tl.abs(x))
    amax = tl.max(magnitude, 1)
    if p_codes is None:
        tl.store(p_scale_inv + i_row, amax, mask=m_row)
    else:
        scale = scale_of(amax, largest, epsilon, value_for_inf, kept)
        tl.store(p_scale_inv + i_row, tl.div_rn(tl.full([B], 1, tl.float32), scale), mask=m_row)
        p_codes += i_row[:, None] * columns
        for first in range(0, columns, BK):
            i_column = first + tl.arange(0, BK)
            mask = m_row[:, None] & (i_column < columns)[None, :]
            x = tl.load(p_x + i_column[None, :], mask=mask, other=0).to(tl.float32)
            codes = (x * scale[:, None]).to(p_codes.dtype.element_ty)
            tl.store(p_codes + i_column[None, :], codes, mask=mask)


@triton.jit
def _column_amax_kernel(
    p_x,
    p_amax,
    p_table,
    groups,
    rows,
    columns,
    row_stride,
    B: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
):
    chunks = tl.cdiv(columns, BK)
    i_block = tl.program_id(0) // chunks
    i_column = (tl.program_id(0) % chunks) * BK + tl.arange(0, BK)
    first, end, group = locate_block(p_table, rows, i_block, B)
    if group < groups:
        largest = tl.zeros([BR, BK], tl.float32)
        for i in tl.static_range(0, B, BR):  # pyright: ignore[reportGeneralTypeIssues]
            i_row = first + i + tl.arange(0, BR)
            mask = (i_row < end)[:, None] & (i_column < columns)[None, :]
            p_tile = p_x + i_row.to(tl.int64)[:, None] * row_stride + i_column[None, :]
            x = tl.load(p_tile, mask=mask, other=0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(x))
        # Bits of floats that are not negative are ordered as the floats are.
        bits = tl.cast(tl.max(largest, 0), tl.int32, bitcast=True)
        p_group = p_amax + tl.cast(group, tl.int64) * columns
        tl.atomic_max(p_group + i_column, bits, mask=i_column < columns, sem="relaxed")


def row_amax(x_MK: Tensor) -> Tensor:
    """Largest magnitude of each row as float32 ``(M, 1)``; NaN is ignored."""
    amax_M1 = torch.empty(len(x_MK), 1, dtype=torch.float32, device=x_MK.device)
    _over_rows(x_MK, None, amax_M1, (1.0, 0.0, 0))
    return amax_M1


def column_amax(x_MK: Tensor, ends_G: Tensor | None = None) -> Tensor:
    """Largest magnitude of each column, or of each group's, as float32 ``(1, K)`` or ``(G, K)``."""
    x_MK = unit_columns(x_MK)
    rows, columns = x_MK.shape
    groups = group_number(ends_G)
    amax_GK = torch.zeros(groups, columns, dtype=torch.int32, device=x_MK.device)
    BK = min(_BLOCK_COLUMNS, max(16, triton.next_power_of_2(columns)))
    tile: dict[str, Any] = {"B": _BLOCK, "BR": 32, "BK": BK}
    programs = block_count(rows, ends_G, _BLOCK) * triton.cdiv(columns, BK)
    if programs:
        _column_amax_kernel[(programs,)](
            x_MK,
            amax_GK,
            block_table(ends_G, rows, _BLOCK),
            groups,
            rows,
            columns,
            x_MK.stride(0),
            **tile,
        )
    return amax_GK.view(torch.float32)


def quantize_float8_rows(
    x_MK: Tensor, code_dtype: torch.dtype, *, epsilon: float = 0.0, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """Codes ``(M, K)`` as bytes and inverse scales ``(M, 1)``."""
    codes_MK = new_bytes(*x_MK.shape, like=x_MK)
    scale_inv_M1 = torch.empty(len(x_MK), 1, dtype=torch.float32, device=x_MK.device)
    options = (torch.finfo(code_dtype).max, epsilon, kept_bits(power_of_two=power_of_two))
    _over_rows(x_MK, codes_MK.view(code_dtype), scale_inv_M1, options)
    return codes_MK, scale_inv_M1


def dequantize_float8_rows(
    codes_MK: Tensor, scale_inv_M1: Tensor, code_dtype: torch.dtype, dtype: torch.dtype
) -> Tensor:
    """Values ``(M, K)`` of :func:`quantize_float8_rows`."""
    return dequantize_scaled(codes_MK, scale_inv_M1, code_dtype, dtype)


def quantize_float8_columns(
    x_MK: Tensor,
    code_dtype: torch.dtype,
    ends_G: Tensor | None = None,
    *,
    epsilon: float = 0.0,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor]:
    """Codes ``(M, K)`` as bytes and inverse scales ``(1, K)``, or ``(G, K)`` with groups."""
    largest = torch.finfo(code_dtype).max
    amax_GK = column_amax(x_MK, ends_G)
    scale_GK = scale_from_amax(amax_GK, largest=largest, epsilon=epsilon, power_of_two=power_of_two)
    codes_MK = quantize_scaled(x_MK, scale_GK, code_dtype, ends_G)
    return codes_MK, torch.ones_like(scale_GK) / scale_GK


def dequantize_float8_columns(
    codes_MK: Tensor,
    scale_inv_GK: Tensor,
    code_dtype: torch.dtype,
    dtype: torch.dtype,
    ends_G: Tensor | None = None,
) -> Tensor:
    """Values ``(M, K)`` of :func:`quantize_float8_columns`; rows past the last group are zero."""
    return dequantize_scaled(codes_MK, scale_inv_GK, code_dtype, dtype, ends_G)


def _over_rows(
    x_MK: Tensor,
    codes_MK: Tensor | None,
    scale_inv_M1: Tensor,
    options: tuple[float, float, int],
) -> None:
    largest, epsilon, kept = options
    x_MK = unit_columns(x_MK)
    rows, columns = x_MK.shape
    BK = min(_COLUMNS, max(16, triton.next_power_of_2(columns)))
    tile: dict[str, Any] = {"B": _ROWS, "BK": BK}
    if rows:
        _quantize_rows_kernel[(triton.cdiv(rows, _ROWS),)](
            x_MK,
            codes_MK,
            scale_inv_M1,
            rows,
            columns,
            x_MK.stride(0),
            largest,
            float(epsilon),
            FLOAT32_MAX,
            kept,
            **tile,
        )
