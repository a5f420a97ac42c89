"""Quantize and dequantize: floats to 8-bit codes with a scale, and back.

Two families.  *Scaled* codes share one float32 scale per tensor or per group of rows.
*MX* codes share one power of two, stored as its exponent, per block of 32 neighbours,
either along a row or down a column; blocks down a column start anew in every group.
A quantizer here returns bytes (``uint8``): what a byte means is the caller's knowledge.

Letters: M rows, K columns, G groups, S blocks, B = 32 values of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from backstash.kernels.reference.grouped_mm import row_groups

MX_BLOCK = 32
FLOAT32_MAX = torch.finfo(torch.float32).max
_POWER_OF_TWO_BITS = -(1 << 23)  # 0xFF800000: sign and exponent without the mantissa
_TWO_TO_MINUS_127 = 0x00400000  # subnormal, so its exponent field is 0
_NAN_CODE = 0x7F


def amax(x: Tensor) -> Tensor:
    """Largest magnitude of ``x`` as float32 ``(1,)``; NaN is ignored, nothing gives zero."""
    if x.numel() == 0:
        return x.new_zeros(1, dtype=torch.float32)
    return _magnitude(x).amax().reshape(1)


def group_amax(x_MK: Tensor, ends_G: Tensor) -> Tensor:
    """Largest magnitude of each group's rows as float32 ``(G,)``; the tail is not read."""
    groups = ends_G.numel()
    if x_MK.numel() == 0:
        return x_MK.new_zeros(groups, dtype=torch.float32)
    amax_M = _magnitude(x_MK).amax(1)
    member_GM = row_groups(ends_G, len(x_MK)) == torch.arange(groups, device=x_MK.device)[:, None]
    return torch.where(member_GM, amax_M, 0.0).amax(1)


def scale_from_amax(
    amax: Tensor,
    *,
    largest: float,
    power_of_two: bool = False,
    epsilon: float = 0.0,
    value_for_inf: float = FLOAT32_MAX,
) -> Tensor:
    """The float32 factor that brings ``amax`` to ``largest``; one where amax says nothing.

    An amax of zero, infinity or NaN gives one.  A quotient too large for float32 becomes
    ``value_for_inf``.  ``power_of_two`` clears the mantissa, so scaling cannot round.
    """
    amax = torch.where(amax < epsilon, epsilon, amax)
    scale = torch.full_like(amax, largest) / amax
    scale = torch.where(scale.isinf(), value_for_inf, scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & _POWER_OF_TWO_BITS).view(torch.float32)
    return torch.where(amax.isfinite() & (amax > 0), scale, 1.0)


def quantize_scaled(
    x_MK: Tensor, scale: Tensor, code_dtype: torch.dtype, ends_G: Tensor | None = None
) -> Tensor:
    """Codes of ``float32(x) * scale``, saturating, as bytes ``(M, K)``.

    ``scale`` is float32 ``(1,)``, or ``(G,)`` with ``ends_G``.  NaN stays NaN.
    """
    values = x_MK.float() * _row_factor(scale, ends_G, len(x_MK))
    return _saturating_codes(values, code_dtype)


def dequantize_scaled(
    codes_MK: Tensor,
    scale_inv: Tensor,
    code_dtype: torch.dtype,
    dtype: torch.dtype,
    ends_G: Tensor | None = None,
) -> Tensor:
    """``float32(code) * scale_inv`` rounded once to ``dtype``, ``(M, K)``."""
    factor = _row_factor(scale_inv, ends_G, len(codes_MK))
    return (codes_MK.view(code_dtype).float() * factor).to(dtype)


def quantize_mx_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP8 along rows: codes ``(M, K)`` and exponents ``(M, ceil(K/32))``, both bytes.

    A last block that is not full uses the values that exist.
    """
    columns = x_MK.shape[1]
    x_MSB = _pad_to_blocks(x_MK.float(), 1).unflatten(1, (-1, MX_BLOCK))
    exponent_MS = _mx_exponent(_magnitude(x_MSB).amax(-1))
    values = x_MSB * _mx_multiplier(exponent_MS)[..., None]
    codes = _saturating_codes(values, torch.float8_e4m3fn)
    return codes.flatten(1)[:, :columns].contiguous(), exponent_MS


def dequantize_mx_rows(codes_MK: Tensor, exponent_MS: Tensor, dtype: torch.dtype) -> Tensor:
    """Values ``(M, K)`` of :func:`quantize_mx_rows`."""
    columns = codes_MK.shape[1]
    factor_MS = _mx_factor(exponent_MS)
    values_MK = codes_MK.view(torch.float8_e4m3fn).float()
    if columns % MX_BLOCK == 0:
        values_MSB = values_MK.unflatten(1, (-1, MX_BLOCK))
        return (values_MSB * factor_MS[..., None]).reshape(codes_MK.shape).to(dtype)
    factor_MK = factor_MS.repeat_interleave(MX_BLOCK, dim=1)[:, :columns]
    return (values_MK * factor_MK).to(dtype)


def quantize_mx_columns(x_MK: Tensor, ends_G: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """MXFP8 down columns: codes ``(M, K)`` in logical order and exponents ``(S, K)``, bytes.

    With ``ends_G`` the blocks start anew in every group and S is ``ceil(M/32) + G``, the
    bound that the host knows; otherwise S is ``ceil(M/32)``.  Exponents of blocks that no
    group uses are zero; codes of rows past the last group are unspecified.
    """
    rows, columns = x_MK.shape
    if ends_G is None:
        x_SBK = _pad_to_blocks(x_MK.float(), 0).unflatten(0, (-1, MX_BLOCK))
        exponent_SK = _mx_exponent(_magnitude(x_SBK).amax(1))
        values = x_SBK * _mx_multiplier(exponent_SK)[:, None]
        codes = _saturating_codes(values, torch.float8_e4m3fn)
        return codes.flatten(0, 1)[:rows], exponent_SK
    rows_SB = _block_rows(ends_G, rows)
    padded_MK = torch.cat([x_MK.float(), x_MK.new_zeros(1, columns, dtype=torch.float32)])
    exponent_SK = _mx_exponent(_magnitude(padded_MK[rows_SB]).amax(1))
    multiplier_MK = _mx_multiplier(exponent_SK)[_row_blocks(ends_G, rows)]
    return _saturating_codes(x_MK.float() * multiplier_MK, torch.float8_e4m3fn), exponent_SK


def dequantize_mx_columns(
    codes_MK: Tensor, exponent_SK: Tensor, dtype: torch.dtype, ends_G: Tensor | None = None
) -> Tensor:
    """Values ``(M, K)`` of :func:`quantize_mx_columns`; rows past the last group are zero."""
    rows = len(codes_MK)
    values_MK = codes_MK.view(torch.float8_e4m3fn).float()
    if ends_G is None:
        factor_MK = _mx_factor(exponent_SK).repeat_interleave(MX_BLOCK, dim=0)[:rows]
        return (values_MK * factor_MK).to(dtype)
    factor_MK = _mx_factor(exponent_SK)[_row_blocks(ends_G, rows)]
    valid_M = torch.arange(rows, device=codes_MK.device) < ends_G[-1]
    return torch.where(valid_M[:, None], values_MK * factor_MK, 0.0).to(dtype)


def mx_block_ends(ends_G: Tensor, rows: int) -> Tensor:
    """Running ends ``(G,)`` int64 of the groups counted in blocks of 32 rows."""
    ends_G = ends_G.long().clamp(max=rows)
    counts_G = ends_G.diff(prepend=ends_G.new_zeros(1))
    return ((counts_G + MX_BLOCK - 1) // MX_BLOCK).cumsum(0)


def _magnitude(x: Tensor) -> Tensor:
    magnitude = x.abs().float()
    return torch.where(magnitude.isnan(), 0.0, magnitude)


def _saturating_codes(values: Tensor, code_dtype: torch.dtype) -> Tensor:
    # Without the clamp a value past the largest code becomes NaN, not the largest code.
    largest = torch.finfo(code_dtype).max
    codes = values.clamp(-largest, largest).to(code_dtype).view(torch.uint8)
    # A NaN has one code whatever its sign: the sign of 0/0 differs from machine to machine.
    # Buffers are contiguous even where x was not: saving takes a prefix of rows as bytes.
    return torch.where(values.isnan(), _NAN_CODE, codes).contiguous()


def _row_factor(factor: Tensor, ends_G: Tensor | None, rows: int) -> Tensor:
    """One factor for all rows, or each row's group's factor ``(M, 1)``, one in the tail."""
    if ends_G is None:
        return factor
    return torch.cat([factor, factor.new_ones(1)])[row_groups(ends_G, rows)][:, None]


def _pad_to_blocks(x: Tensor, dim: int) -> Tensor:
    missing = -x.shape[dim] % MX_BLOCK
    if missing == 0:
        return x
    return F.pad(x, (0, missing) if dim == 1 else (0, 0, 0, missing))


def _mx_exponent(amax: Tensor) -> Tensor:
    """The byte whose power of two is the smallest that brings ``amax`` to 448 or below."""
    bits = (amax * (1.0 / 448.0)).view(torch.int32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    # Code 0 means 2^-127, which still covers subnormals up to half the smallest normal.
    fits = (mantissa == 0) | (exponent >= 254) | ((exponent == 0) & (mantissa <= 0x400000))
    rounded = torch.where(fits, exponent, exponent + 1)
    is_nan = (exponent == 255) & (mantissa != 0)
    return torch.where(is_nan, 255, rounded.clamp(max=254)).to(torch.uint8).contiguous()


def _mx_multiplier(exponent: Tensor) -> Tensor:
    """``1 / 2^(exponent - 127)`` as float32: what a value is multiplied by before its cast."""
    code = exponent.int()
    bits = torch.where(code == 254, _TWO_TO_MINUS_127, (254 - code) << 23)
    return torch.where(code == 255, torch.nan, bits.view(torch.float32))


def _mx_factor(exponent: Tensor) -> Tensor:
    """``2^(exponent - 127)`` as float32: what a code is multiplied by."""
    code = exponent.int()
    bits = torch.where(code == 0, _TWO_TO_MINUS_127, code << 23)
    return torch.where(code == 255, torch.nan, bits.view(torch.float32))


def _block_rows(ends_G: Tensor, rows: int) -> Tensor:
    """Rows ``(S, B)`` of each block of 32; ``rows`` where a block has none."""
    ends_G = ends_G.long().clamp(max=rows)
    starts_G = F.pad(ends_G[:-1], (1, 0))
    block_ends_G = mx_block_ends(ends_G, rows)
    block_starts_G = F.pad(block_ends_G[:-1], (1, 0))
    block_S = torch.arange(-(-rows // MX_BLOCK) + len(ends_G), device=ends_G.device)
    group_S = torch.searchsorted(block_ends_G, block_S, right=True)
    in_use_S = group_S < len(ends_G)
    group_S = group_S.clamp(max=len(ends_G) - 1)
    first_S = starts_G[group_S] + (block_S - block_starts_G[group_S]) * MX_BLOCK
    rows_SB = first_S[:, None] + torch.arange(MX_BLOCK, device=ends_G.device)
    exists_SB = in_use_S[:, None] & (rows_SB < ends_G[group_S][:, None])
    return torch.where(exists_SB, rows_SB, rows)


def _row_blocks(ends_G: Tensor, rows: int) -> Tensor:
    """The block ``(M,)`` of each row; the tail gets the last block, which no group fills."""
    ends_G = ends_G.long().clamp(max=rows)
    starts_G = F.pad(ends_G, (1, 0))
    block_starts_G = F.pad(mx_block_ends(ends_G, rows), (1, 0))
    group_M = row_groups(ends_G, rows)
    row_M = torch.arange(rows, device=ends_G.device)
    last = -(-rows // MX_BLOCK) + len(ends_G) - 1
    return (block_starts_G[group_M] + (row_M - starts_G[group_M]) // MX_BLOCK).clamp(max=last)
