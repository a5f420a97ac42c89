"""Float8 with a float32 scale for each row, or for each column of each group.

A row is what a forward matmul adds up over, a column of a group what a weight gradient does;
with one scale for all of it, the scale leaves the sum.  Codes keep the order of the matrix.

Letters: M rows, K columns, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backstash.kernels.reference.blocks import (
    column_amax,
    row_amax,
    row_factor,
    saturating_codes,
    valid,
)
from backstash.kernels.reference.cast import scale_from_amax
from backstash.kernels.reference.into import Into, written


def quantize_float8_rows(
    x_MK: Tensor,
    code_dtype: torch.dtype,
    *,
    epsilon: float = 0.0,
    power_of_two: bool = False,
    into: Into | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes ``(M, K)`` as bytes and inverse scales ``(M, 1)``."""
    largest = torch.finfo(code_dtype).max
    scale_M1 = scale_from_amax(
        row_amax(x_MK), largest=largest, epsilon=epsilon, power_of_two=power_of_two
    )
    codes = saturating_codes(x_MK.float() * scale_M1, code_dtype)
    return written(into, codes, torch.ones_like(scale_M1) / scale_M1)


def dequantize_float8_rows(
    codes_MK: Tensor, scale_inv_M1: Tensor, code_dtype: torch.dtype, dtype: torch.dtype
) -> Tensor:
    """Values ``(M, K)`` of :func:`quantize_float8_rows`."""
    return (codes_MK.view(code_dtype).float() * scale_inv_M1).to(dtype)


def quantize_float8_columns(
    x_MK: Tensor,
    code_dtype: torch.dtype,
    ends_G: Tensor | None = None,
    *,
    epsilon: float = 0.0,
    power_of_two: bool = False,
    into: Into | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes ``(M, K)`` as bytes and inverse scales ``(1, K)``, or ``(G, K)`` with groups.

    Codes of the tail are unspecified.
    """
    largest = torch.finfo(code_dtype).max
    amax_GK = column_amax(x_MK, ends_G)
    scale_GK = scale_from_amax(amax_GK, largest=largest, epsilon=epsilon, power_of_two=power_of_two)
    codes = saturating_codes(x_MK.float() * row_factor(scale_GK, ends_G, len(x_MK)), code_dtype)
    return written(into, codes, torch.ones_like(scale_GK) / scale_GK)


def dequantize_float8_columns(
    codes_MK: Tensor,
    scale_inv_GK: Tensor,
    code_dtype: torch.dtype,
    dtype: torch.dtype,
    ends_G: Tensor | None = None,
) -> Tensor:
    """Values ``(M, K)`` of :func:`quantize_float8_columns`; rows past the last group are zero."""
    rows = len(codes_MK)
    values_MK = codes_MK.view(code_dtype).float() * row_factor(scale_inv_GK, ends_G, rows)
    if ends_G is not None:
        values_MK = torch.where(valid(ends_G, rows), values_MK, 0.0)
    return values_MK.to(dtype)
