"""Float8 columns that are transposed (*turned*) as they are quantized, for a product just ahead.

Turned is what others call transposed: rows become columns.

Columns that are saved keep the matrix's own order, so that their valid rows are a prefix.  A
gradient is read by its two products and gone: its columns may be written the way the weight
gradient reads them, which spares a pass over the codes, and in the same pass as its rows.

Letters: T rows of the buffer, K columns, G groups, P columns with padding, N rows of a weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from backstash.kernels.reference.blocks import row_amax, saturating_codes
from backstash.kernels.reference.cast import scale_from_amax
from backstash.kernels.reference.float8_mm import transpose_groups
from backstash.kernels.reference.float8_rowwise import (
    quantize_float8_columns,
    quantize_float8_rows,
)
from backstash.kernels.reference.permute import permute


class Turned(NamedTuple):
    """Columns of groups as rows: codes ``(K, P)``, inverse scales ``(G, K)``, ends ``(G,)``.

    Codes and ends are those of :func:`~backstash.kernels.reference.float8_mm.transpose_groups`.
    """

    codes: Tensor
    scale_inv: Tensor
    padded_ends_G: Tensor


def quantize_float8_turned(
    x_TK: Tensor,
    code_dtype: torch.dtype,
    ends_G: Tensor,
    source_T: Tensor | None = None,
    *,
    epsilon: float = 0.0,
    power_of_two: bool = False,
) -> Turned:
    """The columns of ``quantize_float8_columns``, transposed.

    With ``source_T`` row t of the matrix is row ``source_T[t]`` of ``x_TK``, which has as many
    rows as there are tokens then.
    """
    x_TK = x_TK if source_T is None else permute(x_TK, source_T)
    codes_TK, scale_inv_GK = quantize_float8_columns(
        x_TK, code_dtype, ends_G, epsilon=epsilon, power_of_two=power_of_two
    )
    turned_KP, padded_G = transpose_groups(codes_TK.view(code_dtype), ends_G)
    return Turned(turned_KP, scale_inv_GK, padded_G)


class WeightRows(NamedTuple):
    """Rows of G experts' weights, and what their columns will be scaled by.

    Attributes:
        codes: ``(G * N, K)`` as bytes.
        scale_inv: ``(G * N, 1)``.
        parts_GPK: Of each part of an expert's rows the largest of each column, in magnitude, in the
            weight's dtype, or in float32 where that has more bits.  NaN is ignored, but where a
            part has nothing else.
    """

    codes: Tensor
    scale_inv: Tensor
    parts_GPK: Tensor


def quantize_float8_rows_and_turned(
    x_TK: Tensor,
    code_dtype: torch.dtype,
    ends_G: Tensor,
    *,
    epsilon: float = 0.0,
    power_of_two: bool = False,
) -> tuple[tuple[Tensor, Tensor], Turned]:
    """The rows of ``quantize_float8_rows`` and the columns of :func:`quantize_float8_turned`.

    Codes and scales of rows in the tail are unspecified.
    """
    options = {"epsilon": epsilon, "power_of_two": power_of_two}
    codes_TK, scale_inv_T1 = quantize_float8_rows(x_TK, code_dtype, **options)
    turned = quantize_float8_turned(x_TK, code_dtype, ends_G, **options)
    return (codes_TK, scale_inv_T1), turned


def quantize_float8_weight_rows(
    w_GNK: Tensor, code_dtype: torch.dtype, *, epsilon: float = 0.0, power_of_two: bool = False
) -> WeightRows:
    """The rows of ``quantize_float8_rows``, and the largest magnitudes of each expert's columns."""
    options: dict[str, Any] = {"epsilon": epsilon, "power_of_two": power_of_two}
    rows = quantize_float8_rows(w_GNK.flatten(0, 1), code_dtype, **options)
    return WeightRows(*rows, _largest_of_columns(w_GNK).unsqueeze(1).to(noted_dtype(w_GNK)))


def largest_of_parts(parts_GPK: Tensor) -> Tensor:
    """The largest magnitudes ``(G, K)`` of what :func:`quantize_float8_weight_rows` noted."""
    return parts_GPK.abs().nan_to_num(0, posinf=float("inf")).amax(1)


def noted_dtype(w_GNK: Tensor) -> torch.dtype:
    """What holds a magnitude of the weight exactly, as far as it is quantized from it."""
    return w_GNK.dtype if w_GNK.dtype.itemsize == 2 else torch.float32


def quantize_float8_weight(
    w_GNK: Tensor,
    code_dtype: torch.dtype,
    amax_GK: Tensor | None = None,
    *,
    epsilon: float = 0.0,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor]:
    """The columns of each expert's weight as rows, with a scale for each.

    ``amax_GK`` is :func:`largest_of_parts` of this weight, if its parts were noted.

    Returns:
        Codes ``(G, K, N)`` and inverse scales ``(G, K)``: those of ``quantize_float8_columns``
        where each expert's rows are a group, transposed.
    """
    scale_GK = scale_from_amax(
        _largest_of_columns(w_GNK) if amax_GK is None else amax_GK.float(),
        largest=torch.finfo(code_dtype).max,
        epsilon=epsilon,
        power_of_two=power_of_two,
    )
    codes = saturating_codes(w_GNK.mT.float() * scale_GK.unsqueeze(2), code_dtype)
    return codes.view(code_dtype).contiguous(), torch.ones_like(scale_GK) / scale_GK


def _largest_of_columns(w_GNK: Tensor) -> Tensor:
    """Of each expert, float32 ``(G, K)``."""
    return row_amax(w_GNK.mT.flatten(0, 1)).view(len(w_GNK), w_GNK.shape[2])
