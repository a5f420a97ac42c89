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

from backstash.kernels.reference.blocks import (
    column_blocks,
    cut_columns,
    cut_rows,
    magnitude,
    row_factor,
    row_places,
    saturating_codes,
    valid,
)
from backstash.kernels.reference.grouped_mm import row_groups
from backstash.kernels.reference.into import Into, unless, written

MX_BLOCK = 32
FLOAT32_MAX = torch.finfo(torch.float32).max
_POWER_OF_TWO_BITS = -(1 << 23)  # 0xFF800000: sign and exponent without the mantissa
_TWO_TO_MINUS_127 = 0x00400000  # subnormal, so its exponent field is 0


def amax(x: Tensor, *, noop: Tensor | None = None) -> Tensor:
    """Largest magnitude of ``x`` as float32 ``(1,)``; NaN is ignored, nothing gives zero.

    Where the device's ``noop`` is set (see :class:`Into`), nothing is read and it is zero.
    """
    if x.numel() == 0:
        return x.new_zeros(1, dtype=torch.float32)
    return unless(noop, magnitude(x).amax().reshape(1))


def group_amax(x_MK: Tensor, ends_G: Tensor, *, noop: Tensor | None = None) -> Tensor:
    """Largest magnitude of each group's rows as float32 ``(G,)``; the tail is not read.

    Where the device's ``noop`` is set (see :class:`Into`), nothing is read and all are zero.
    """
    groups = ends_G.numel()
    if x_MK.numel() == 0:
        return x_MK.new_zeros(groups, dtype=torch.float32)
    amax_M = magnitude(x_MK).amax(1)
    member_GM = row_groups(ends_G, len(x_MK)) == torch.arange(groups, device=x_MK.device)[:, None]
    return unless(noop, torch.where(member_GM, amax_M, 0.0).amax(1))


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
    x_MK: Tensor,
    scale: Tensor,
    code_dtype: torch.dtype,
    ends_G: Tensor | None = None,
    *,
    into: Into | None = None,
) -> Tensor:
    """Codes of ``float32(x) * scale``, saturating, as bytes ``(M, K)``.

    ``scale`` is float32 ``(1,)``, or ``(G,)`` with ``ends_G``.  NaN stays NaN.
    """
    values = x_MK.float() * row_factor(scale, ends_G, len(x_MK))
    return written(into, saturating_codes(values, code_dtype))[0]


def dequantize_scaled(
    codes_MK: Tensor,
    scale_inv: Tensor,
    code_dtype: torch.dtype,
    dtype: torch.dtype,
    ends_G: Tensor | None = None,
) -> Tensor:
    """``float32(code) * scale_inv`` rounded once to ``dtype``, ``(M, K)``."""
    factor = row_factor(scale_inv, ends_G, len(codes_MK))
    return (codes_MK.view(code_dtype).float() * factor).to(dtype)


def quantize_mx_rows(x_MK: Tensor, *, into: Into | None = None) -> tuple[Tensor, Tensor]:
    """MXFP8 along rows: codes ``(M, K)`` and exponents ``(M, ceil(K/32))``, both bytes.

    A last block that is not full uses the values that exist.
    """
    x_MCB = cut_columns(x_MK.float(), MX_BLOCK)
    exponent_MC = _mx_exponent(magnitude(x_MCB).amax(-1))
    codes = _mx_codes(x_MCB, _mx_multiplier(exponent_MC)[..., None])
    return written(into, codes.flatten(1)[:, : x_MK.shape[1]].contiguous(), exponent_MC)


def dequantize_mx_rows(codes_MK: Tensor, exponent_MC: Tensor, dtype: torch.dtype) -> Tensor:
    """Values ``(M, K)`` of :func:`quantize_mx_rows`."""
    column_K = column_blocks(codes_MK.shape[1], MX_BLOCK, codes_MK.device)
    return _mx_values(codes_MK, _mx_factor(exponent_MC)[:, column_K], dtype)


def quantize_mx_columns(
    x_MK: Tensor, ends_G: Tensor | None = None, *, into: Into | None = None
) -> tuple[Tensor, Tensor]:
    """MXFP8 down columns: codes ``(M, K)`` in logical order and exponents ``(S, K)``, bytes.

    With ``ends_G`` the blocks start anew in every group and S is ``ceil(M/32) + G``, the
    bound that the host knows; otherwise S is ``ceil(M/32)``.  Exponents of blocks that no
    group uses are zero; codes of rows past the last group are unspecified.
    """
    x_SBK = cut_rows(x_MK, MX_BLOCK, ends_G)
    exponent_SK = _mx_exponent(magnitude(x_SBK).amax(1))
    if ends_G is None:
        codes = _mx_codes(x_SBK, _mx_multiplier(exponent_SK)[:, None]).flatten(0, 1)
        # A view of the first rows would keep those of the padding alive.
        whole = len(codes) == len(x_MK)
        return written(into, codes if whole else codes[: len(x_MK)].clone(), exponent_SK)
    row_M, _ = row_places(ends_G, len(x_MK), MX_BLOCK, x_MK.device)
    return written(into, _mx_codes(x_MK, _mx_multiplier(exponent_SK)[row_M]), exponent_SK)


def dequantize_mx_columns(
    codes_MK: Tensor, exponent_SK: Tensor, dtype: torch.dtype, ends_G: Tensor | None = None
) -> Tensor:
    """Values ``(M, K)`` of :func:`quantize_mx_columns`; rows past the last group are zero."""
    row_M, _ = row_places(ends_G, len(codes_MK), MX_BLOCK, codes_MK.device)
    return _mx_values(codes_MK, _mx_factor(exponent_SK)[row_M], dtype, ends_G)


def quantize_mx_both(
    x_MK: Tensor, ends_G: Tensor | None = None, *, into: Into | None = None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """:func:`quantize_mx_rows` and :func:`quantize_mx_columns` of the same values.

    With ``ends_G``, codes and exponents of rows past the last group are unspecified.
    """
    four = written(into, *quantize_mx_rows(x_MK), *quantize_mx_columns(x_MK, ends_G))
    return four[:2], four[2:]


def quantize_mx_tiles(
    x_MK: Tensor, ends_G: Tensor | None = None, *, into: Into | None = None
) -> tuple[Tensor, Tensor]:
    """MXFP8 in tiles of 32 by 32: codes ``(M, K)`` and exponents ``(S, ceil(K/32))``, bytes.

    One set of codes for both directions: the transpose has the same tiles.  S and the groups
    are as in :func:`quantize_mx_columns`.
    """
    amax_SK = magnitude(cut_rows(x_MK, MX_BLOCK, ends_G)).amax(1)
    exponent_SC = _mx_exponent(cut_columns(amax_SK, MX_BLOCK).amax(-1))
    codes_MK = _mx_codes(x_MK, _per_tile(_mx_multiplier(exponent_SC), x_MK, ends_G))
    return written(into, codes_MK, exponent_SC)


def dequantize_mx_tiles(
    codes_MK: Tensor, exponent_SC: Tensor, dtype: torch.dtype, ends_G: Tensor | None = None
) -> Tensor:
    """Values ``(M, K)`` of :func:`quantize_mx_tiles`; rows past the last group are zero."""
    factor_MK = _per_tile(_mx_factor(exponent_SC), codes_MK, ends_G)
    return _mx_values(codes_MK, factor_MK, dtype, ends_G)


def _per_tile(factor_SC: Tensor, like_MK: Tensor, ends_G: Tensor | None) -> Tensor:
    row_M, _ = row_places(ends_G, len(like_MK), MX_BLOCK, like_MK.device)
    column_K = column_blocks(like_MK.shape[1], MX_BLOCK, like_MK.device)
    return factor_SC[row_M[:, None], column_K]


def _mx_codes(x: Tensor, multiplier: Tensor) -> Tensor:
    return saturating_codes(x.float() * multiplier, torch.float8_e4m3fn)


def _mx_values(
    codes_MK: Tensor, factor_MK: Tensor, dtype: torch.dtype, ends_G: Tensor | None = None
) -> Tensor:
    values_MK = codes_MK.view(torch.float8_e4m3fn).float() * factor_MK
    if ends_G is not None:
        values_MK = torch.where(valid(ends_G, len(codes_MK)), values_MK, 0.0)
    return values_MK.to(dtype)


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
