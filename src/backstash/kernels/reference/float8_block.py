"""Float8 with a float32 scale for each block of 128: along rows, down columns, or in tiles.

Along rows and down columns a block is a line of 128 values; a tile is 128 by 128 and serves
both directions, because the transpose has the same tiles.  A block at the edge uses the
values that exist.  Blocks of rows start anew in every group.  Codes keep the order of the
matrix; the scales that are returned are those that codes are multiplied by.

Letters: M rows, K columns, G groups, B = 128, S blocks of rows (``ceil(M/128)``, and G more
with groups), C = ``ceil(K/128)`` blocks of columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backstash.kernels.reference.blocks import (
    block_ends,
    column_blocks,
    cut_columns,
    cut_rows,
    magnitude,
    row_places,
    saturating_codes,
    valid,
)
from backstash.kernels.reference.cast import FLOAT32_MAX, scale_from_amax
from backstash.kernels.reference.into import Into, written

FLOAT8_BLOCK = 128


def quantize_block_rows(
    x_MK: Tensor,
    code_dtype: torch.dtype,
    *,
    epsilon: float = 0.0,
    power_of_two: bool = True,
    into: Into | None = None,
) -> tuple[Tensor, Tensor]:
    """Blocks along rows: codes ``(M, K)`` as bytes and inverse scales ``(M, C)``."""
    amax_MC = magnitude(cut_columns(x_MK, FLOAT8_BLOCK)).amax(-1)
    scale_MC = _scale(amax_MC, x_MK.dtype, code_dtype, epsilon, power_of_two=power_of_two)
    column_K = column_blocks(x_MK.shape[1], FLOAT8_BLOCK, x_MK.device)
    codes = saturating_codes(x_MK.float() * scale_MC[:, column_K], code_dtype)
    return written(into, codes, torch.ones_like(scale_MC) / scale_MC)


def dequantize_block_rows(
    codes_MK: Tensor, scale_inv_MC: Tensor, code_dtype: torch.dtype, dtype: torch.dtype
) -> Tensor:
    """Values ``(M, K)`` of :func:`quantize_block_rows`."""
    column_K = column_blocks(codes_MK.shape[1], FLOAT8_BLOCK, codes_MK.device)
    return (codes_MK.view(code_dtype).float() * scale_inv_MC[:, column_K]).to(dtype)


def quantize_block_columns(
    x_MK: Tensor,
    code_dtype: torch.dtype,
    ends_G: Tensor | None = None,
    *,
    epsilon: float = 0.0,
    power_of_two: bool = True,
    into: Into | None = None,
) -> tuple[Tensor, Tensor]:
    """Blocks down columns: codes ``(M, K)`` as bytes and inverse scales ``(S, K)``.

    Scales of blocks that no group uses are zero; codes of the tail are unspecified.
    """
    amax_SK = magnitude(cut_rows(x_MK, FLOAT8_BLOCK, ends_G)).amax(1)
    scale_SK = _scale(amax_SK, x_MK.dtype, code_dtype, epsilon, power_of_two=power_of_two)
    row_M, _ = row_places(ends_G, len(x_MK), FLOAT8_BLOCK, x_MK.device)
    codes = saturating_codes(x_MK.float() * scale_SK[row_M], code_dtype)
    return written(into, codes, _inverse(scale_SK, ends_G, len(x_MK)))


def dequantize_block_columns(
    codes_MK: Tensor,
    scale_inv_SK: Tensor,
    code_dtype: torch.dtype,
    dtype: torch.dtype,
    ends_G: Tensor | None = None,
) -> Tensor:
    """Values ``(M, K)`` of :func:`quantize_block_columns`; rows past the last group are zero."""
    row_M, _ = row_places(ends_G, len(codes_MK), FLOAT8_BLOCK, codes_MK.device)
    return _values(codes_MK.view(code_dtype), scale_inv_SK[row_M], dtype, ends_G)


def quantize_block_both(
    x_MK: Tensor,
    code_dtype: torch.dtype,
    ends_G: Tensor | None = None,
    *,
    epsilon: float = 0.0,
    power_of_two: bool = True,
    into: Into | None = None,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """:func:`quantize_block_rows` and :func:`quantize_block_columns` of the same values.

    With ``ends_G``, codes and scales of rows past the last group are unspecified.
    """
    options: Any = {"epsilon": epsilon, "power_of_two": power_of_two}
    rows = quantize_block_rows(x_MK, code_dtype, **options)
    four = written(into, *rows, *quantize_block_columns(x_MK, code_dtype, ends_G, **options))
    return four[:2], four[2:]


def quantize_block_tiles(
    x_MK: Tensor,
    code_dtype: torch.dtype,
    ends_G: Tensor | None = None,
    *,
    epsilon: float = 0.0,
    power_of_two: bool = True,
    into: Into | None = None,
) -> tuple[Tensor, Tensor]:
    """Tiles: codes ``(M, K)`` as bytes and inverse scales ``(S, C)``.

    Scales of blocks that no group uses are zero; codes of the tail are unspecified.
    """
    amax_SK = magnitude(cut_rows(x_MK, FLOAT8_BLOCK, ends_G)).amax(1)
    amax_SC = cut_columns(amax_SK, FLOAT8_BLOCK).amax(-1)
    scale_SC = _scale(amax_SC, x_MK.dtype, code_dtype, epsilon, power_of_two=power_of_two)
    codes = saturating_codes(x_MK.float() * _per_tile(scale_SC, x_MK, ends_G), code_dtype)
    return written(into, codes, _inverse(scale_SC, ends_G, len(x_MK)))


def dequantize_block_tiles(
    codes_MK: Tensor,
    scale_inv_SC: Tensor,
    code_dtype: torch.dtype,
    dtype: torch.dtype,
    ends_G: Tensor | None = None,
) -> Tensor:
    """Values ``(M, K)`` of :func:`quantize_block_tiles`; rows past the last group are zero."""
    factor_MK = _per_tile(scale_inv_SC, codes_MK, ends_G)
    return _values(codes_MK.view(code_dtype), factor_MK, dtype, ends_G)


def _scale(
    amax: Tensor,
    dtype: torch.dtype,
    code_dtype: torch.dtype,
    epsilon: float,
    *,
    power_of_two: bool,
) -> Tensor:
    """The factor of each block; one too large for float32 is the largest of the input's dtype."""
    return scale_from_amax(
        amax,
        largest=torch.finfo(code_dtype).max,
        power_of_two=power_of_two,
        epsilon=epsilon,
        value_for_inf=min(torch.finfo(dtype).max, FLOAT32_MAX),
    )


def _inverse(scale_S: Tensor, ends_G: Tensor | None, rows: int) -> Tensor:
    inverse_S = torch.ones_like(scale_S) / scale_S
    if ends_G is None:
        return inverse_S
    block_S = torch.arange(len(scale_S), device=scale_S.device)[:, None]
    return torch.where(block_S < block_ends(ends_G, rows, FLOAT8_BLOCK)[-1], inverse_S, 0.0)


def _per_tile(factor_SC: Tensor, like_MK: Tensor, ends_G: Tensor | None) -> Tensor:
    row_M, _ = row_places(ends_G, len(like_MK), FLOAT8_BLOCK, like_MK.device)
    column_K = column_blocks(like_MK.shape[1], FLOAT8_BLOCK, like_MK.device)
    return factor_SC[row_M[:, None], column_K]


def _values(
    codes_MK: Tensor, factor_MK: Tensor, dtype: torch.dtype, ends_G: Tensor | None
) -> Tensor:
    values_MK = codes_MK.float() * factor_MK
    if ends_G is not None:
        values_MK = torch.where(valid(ends_G, len(codes_MK)), values_MK, 0.0)
    return values_MK.to(dtype)
