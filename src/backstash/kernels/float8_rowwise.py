"""Float8 with a scale for each row or column on a GPU: the twins of the reference.

A row is a line, read once, unless it is too long for the registers of a program.  The largest
value of such a row, and that of a column of a group, takes a pass of its own.

Letters: M rows, K columns, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backstash.kernels.blocks import group_number, new_bytes
from backstash.kernels.cast.lines import LONGEST_LINE, line_amax, quantize_lines
from backstash.kernels.cast.scaled import (
    column_amax,
    dequantize_scaled,
    fill_scales,
    quantize_scaled,
)
from backstash.kernels.cast.scales import scaling_of
from backstash.kernels.reference.into import Into, noop_of


def row_amax(x_MK: Tensor) -> Tensor:
    """Largest magnitude of each row as float32 ``(M, 1)``; NaN is ignored."""
    amax_MC = line_amax(x_MK, min(LONGEST_LINE, max(1, x_MK.shape[1])))
    if amax_MC.shape[1] == 1:
        return amax_MC
    return amax_MC.amax(1, keepdim=True) if x_MK.shape[1] else amax_MC.new_zeros(len(x_MK), 1)


def quantize_float8_rows(
    x_MK: Tensor,
    code_dtype: torch.dtype,
    *,
    epsilon: float = 0.0,
    power_of_two: bool = False,
    into: Into | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes ``(M, K)`` as bytes and inverse scales ``(M, 1)``."""
    if into is None:
        codes_MK = new_bytes(*x_MK.shape, like=x_MK)
        scale_inv_M1 = torch.empty(len(x_MK), 1, dtype=torch.float32, device=x_MK.device)
    else:
        codes_MK, scale_inv_M1 = into.buffers
    scaling, noop = scaling_of(code_dtype, epsilon, power_of_two=power_of_two), noop_of(into)
    if x_MK.shape[1] <= LONGEST_LINE:
        codes = codes_MK.view(code_dtype)
        quantize_lines(x_MK, max(1, x_MK.shape[1]), codes, scale_inv_M1, scaling, noop)
    else:
        scale_M1 = fill_scales(row_amax(x_MK), scaling, scale_inv_M1, noop)
        quantize_scaled(x_MK, scale_M1, code_dtype, into=Into((codes_MK,), noop))
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
    into: Into | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes ``(M, K)`` as bytes and inverse scales ``(1, K)``, or ``(G, K)`` with groups."""
    if into is None:
        shape = group_number(ends_G), x_MK.shape[1]
        codes_MK = new_bytes(*x_MK.shape, like=x_MK)
        scale_inv_GK = torch.empty(shape, dtype=torch.float32, device=x_MK.device)
    else:
        codes_MK, scale_inv_GK = into.buffers
    noop = noop_of(into)
    amax_GK = column_amax(x_MK, ends_G, noop=noop)
    scaling = scaling_of(code_dtype, epsilon, power_of_two=power_of_two)
    scale_GK = fill_scales(amax_GK, scaling, scale_inv_GK, noop)
    quantize_scaled(x_MK, scale_GK, code_dtype, ends_G, into=Into((codes_MK,), noop))
    return codes_MK, scale_inv_GK


def dequantize_float8_columns(
    codes_MK: Tensor,
    scale_inv_GK: Tensor,
    code_dtype: torch.dtype,
    dtype: torch.dtype,
    ends_G: Tensor | None = None,
) -> Tensor:
    """Values ``(M, K)`` of :func:`quantize_float8_columns`; rows past the last group are zero."""
    return dequantize_scaled(codes_MK, scale_inv_GK, code_dtype, dtype, ends_G)
