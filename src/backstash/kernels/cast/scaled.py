"""Codes that share a float32 scale: per tensor, group, row or column.

The hardware's cast is the definition's: it rounds to nearest even, a value past the largest
code becomes the largest code, and every NaN becomes 0x7F.

Letters: M rows, K columns, G groups, B rows of a program's block.
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
from backstash.kernels.reference.cast import FLOAT32_MAX

_ROWS = 32
_COLUMNS = 256
_STEPS = 4
_POWER_OF_TWO_BITS = -(1 << 23)  # 0xFF800000: sign and exponent without the mantissa
_ALL_BITS = -1


@triton.jit
def _amax_kernel(
    p_x,
    p_amax,
    p_table,
    groups,
    rows,
    columns,
    row_stride,
    B: tl.constexpr,
    BK: tl.constexpr,
    STEPS: tl.constexpr,
):
    chunks = tl.cdiv(columns, BK * STEPS)
    i_block = tl.program_id(0) // chunks
    i_chunk = tl.program_id(0) % chunks
    first, end, group = locate_block(p_table, rows, i_block, B)
    if group < groups:
        i_row = first + tl.arange(0, B)
        p_row = p_x + i_row.to(tl.int64)[:, None] * row_stride
        largest = tl.zeros([B, BK], tl.float32)
        for i_step in range(STEPS):
            i_column = (i_chunk * STEPS + i_step) * BK + tl.arange(0, BK)
            mask = (i_row < end)[:, None] & (i_column < columns)[None, :]
            x = tl.load(p_row + i_column[None, :], mask=mask, other=0).to(tl.float32)
            # The maximum with a NaN is the other operand: a NaN does not count.
            largest = tl.maximum(largest, tl.abs(x))
        bits = tl.cast(tl.max(tl.max(largest, 1), 0), tl.int32, bitcast=True)
        # Bits of floats that are not negative are ordered as the floats are.
        tl.atomic_max(p_amax + group, bits, sem="relaxed")


def amax(x: Tensor) -> Tensor:
    """Largest magnitude of ``x`` as float32 ``(1,)``; NaN is ignored, nothing gives zero."""
    return _amax(x.reshape(-1, x.shape[-1] if x.ndim else 1) if x.numel() else x.new_zeros(0, 1))


def group_amax(x_MK: Tensor, ends_G: Tensor) -> Tensor:
    """Largest magnitude of each group's rows as float32 ``(G,)``; the tail is not read."""
    return _amax(x_MK, ends_G)


def _amax(x_MK: Tensor, ends_G: Tensor | None = None) -> Tensor:
    x_MK = unit_columns(x_MK)
    rows, columns = x_MK.shape
    groups = group_number(ends_G)
    amax_G = torch.zeros(groups, dtype=torch.int32, device=x_MK.device)
    tile, programs = _tile(rows, columns, ends_G)
    if programs:
        _amax_kernel[(programs,)](
            x_MK,
            amax_G,
            block_table(ends_G, rows, _ROWS),
            groups,
            rows,
            columns,
            x_MK.stride(0),
            **tile,
        )
    return amax_G.view(torch.float32)


@triton.jit
def scale_of(amax, largest, epsilon, value_for_inf, kept_bits):
    """The float32 factor that brings ``amax`` to ``largest``; one where amax says nothing."""
    amax = tl.where(amax < epsilon, epsilon, amax)
    scale = tl.div_rn(tl.zeros_like(amax) + largest, amax)
    scale = tl.where(scale == float("inf"), value_for_inf, scale)
    scale = (scale.to(tl.int32, bitcast=True) & kept_bits).to(tl.float32, bitcast=True)
    return tl.where((amax > 0) & (amax < float("inf")), scale, 1.0)


@triton.jit
def _scale_kernel(
    p_amax, p_scale, count, largest, epsilon, value_for_inf, kept_bits, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    amax = tl.load(p_amax + i, mask=i < count, other=0)
    scale = scale_of(amax, largest, epsilon, value_for_inf, kept_bits)
    tl.store(p_scale + i, scale, mask=i < count)


def kept_bits(*, power_of_two: bool) -> int:
    """The bits of a scale that stay: all, or those of a power of two."""
    return _POWER_OF_TWO_BITS if power_of_two else _ALL_BITS


def scale_from_amax(
    amax: Tensor,
    *,
    largest: float,
    power_of_two: bool = False,
    epsilon: float = 0.0,
    value_for_inf: float = FLOAT32_MAX,
) -> Tensor:
    """The float32 factor that brings ``amax`` to ``largest``; one where amax says nothing."""
    amax = amax.contiguous()
    scale, count = torch.empty_like(amax), amax.numel()
    if count:
        tile: dict[str, Any] = {"BLOCK": 256}
        _scale_kernel[(triton.cdiv(count, 256),)](
            amax,
            scale,
            count,
            largest,
            float(epsilon),
            value_for_inf,
            kept_bits(power_of_two=power_of_two),
            **tile,
        )
    return scale


@triton.jit
def _load_scale(p_scale, i_row, i_column, row_stride, column_stride):
    """Scales that fit a tile: one for all, or one for each row or column."""
    if row_stride is not None:
        scale = tl.load(p_scale + i_row.to(tl.int64) * row_stride)[:, None]
    elif column_stride is not None:
        scale = tl.load(p_scale + i_column.to(tl.int64) * column_stride)[None, :]
    else:
        scale = tl.load(p_scale)
    return scale


@triton.jit
def _multiply_kernel(
    p_from,
    p_scale,
    p_to,
    p_table,
    groups,
    rows,
    columns,
    from_stride,
    scale_group_stride,
    scale_row_stride,
    scale_column_stride,
    B: tl.constexpr,
    BK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Values times their scale, cast to what ``p_to`` points to: both directions are this."""
    chunks = tl.cdiv(columns, BK * STEPS)
    i_block = tl.program_id(0) // chunks
    i_chunk = tl.program_id(0) % chunks
    first, end, group = locate_block(p_table, rows, i_block, B)
    i_row = first + tl.arange(0, B)
    m_row = i_row < end
    # The tail is written, as zeros, and never read.
    m_read = i_row < tl.where(group < groups, end, first)
    p_scale += tl.cast(tl.minimum(group, groups - 1), tl.int64) * scale_group_stride
    p_from += i_row.to(tl.int64)[:, None] * from_stride
    p_to += i_row.to(tl.int64)[:, None] * columns
    i_scale_row = tl.minimum(i_row, rows - 1)
    for i_step in range(STEPS):
        i_column = (i_chunk * STEPS + i_step) * BK + tl.arange(0, BK)
        m_column = i_column < columns
        i_scale_column = tl.minimum(i_column, columns - 1)
        scale = _load_scale(
            p_scale, i_scale_row, i_scale_column, scale_row_stride, scale_column_stride
        )
        mask = m_read[:, None] & m_column[None, :]
        value = tl.load(p_from + i_column[None, :], mask=mask, other=0.0).to(tl.float32)
        value = tl.where(mask, value * scale, 0.0)
        mask = m_row[:, None] & m_column[None, :]
        tl.store(p_to + i_column[None, :], value.to(p_to.dtype.element_ty), mask=mask)


def quantize_scaled(
    x_MK: Tensor, scale: Tensor, code_dtype: torch.dtype, ends_G: Tensor | None = None
) -> Tensor:
    """Codes of ``float32(x) * scale``, saturating, as bytes ``(M, K)``; NaN stays NaN."""
    codes_MK = new_bytes(*x_MK.shape, like=x_MK)
    _multiply(unit_columns(x_MK), scale, codes_MK.view(code_dtype), ends_G)
    return codes_MK


def dequantize_scaled(
    codes_MK: Tensor,
    scale_inv: Tensor,
    code_dtype: torch.dtype,
    dtype: torch.dtype,
    ends_G: Tensor | None = None,
) -> Tensor:
    """``float32(code) * scale_inv`` rounded once to ``dtype``; rows past the groups are zero."""
    y_MK = torch.empty(codes_MK.shape, dtype=dtype, device=codes_MK.device)
    _multiply(unit_columns(codes_MK).view(code_dtype), scale_inv, y_MK, ends_G)
    return y_MK


def _multiply(from_MK: Tensor, scale: Tensor, to_MK: Tensor, ends_G: Tensor | None) -> None:
    rows, columns = from_MK.shape
    tile, programs = _tile(rows, columns, ends_G)
    if not programs:
        return
    per_column = scale.ndim == 2 and scale.shape[1] > 1
    per_row = ends_G is None and scale.ndim == 2 and scale.shape[0] > 1
    _multiply_kernel[(programs,)](
        from_MK,
        scale,
        to_MK,
        block_table(ends_G, rows, _ROWS),
        group_number(ends_G),
        rows,
        columns,
        from_MK.stride(0),
        scale.stride(0),
        scale.stride(0) if per_row else None,
        scale.stride(1) if per_column else None,
        **tile,
    )


def _tile(rows: int, columns: int, ends_G: Tensor | None) -> tuple[dict[str, Any], int]:
    """The constants of a launch, and how many programs it has."""
    BK = min(_COLUMNS, max(16, triton.next_power_of_2(columns)))
    steps = min(_STEPS, max(1, triton.cdiv(columns, BK)))
    programs = block_count(rows, ends_G, _ROWS) * triton.cdiv(columns, BK * steps)
    return {"B": _ROWS, "BK": BK, "STEPS": steps}, programs
