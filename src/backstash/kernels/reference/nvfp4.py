"""NVFP4: E2M1 codes of four bits, an E4M3 scale for each block of 16, a float32 one over all.

A code is a nibble: 0 .5 1 1.5 2 3 4 6 and the same negated; NaN becomes 6.  The scale above
the blocks comes from the largest magnitude of a tensor, a group, or a single row or column.
Two codes are a byte, the lower nibble first: neighbours along a row, or down a column.

*Rows* keep the order of the matrix.  *Columns* are transposed, group by group: each column
of a group is ``rows / 2`` bytes, the group's columns lie one after another, and then comes
the next group.  A range of rows is no range of bytes then, but what all groups have is one
prefix of the buffer.  The rows of a group are padded inside to whole bytes, or to whole
blocks where the Hadamard transform mixes them.  *Tiles* of 16 by 16 keep the order of the
matrix and serve both directions, because the transpose has the same tiles.

Letters: M rows, K columns, G groups, B = 16, S blocks of rows (``ceil(M/16)``, and G more
with groups), C = ``ceil(K/16)`` blocks of columns, E elements of a block: 16 or 256.
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
    valid,
)
from backstash.kernels.reference.cast import FLOAT32_MAX
from backstash.kernels.reference.hadamard import rotate, rotate_back
from backstash.kernels.reference.into import Into, written
from backstash.kernels.reference.nvfp4_columns import (
    NVFP4_BLOCK,
    group_factor,
    pack_columns,
    unpack_columns,
)
from backstash.kernels.reference.philox import random_bytes

_LARGEST = 448.0 * 6.0
_TINY = 2.0**-14
# Streams of random bytes: what is quantized along two directions gets independent draws.
_ROWS, _COLUMNS, _TILES = 0, 1, 2


def quantize_nvfp4_rows(
    x_MK: Tensor,
    amax: Tensor,
    ends_G: Tensor | None = None,
    seed: Tensor | None = None,
    *,
    four_over_six: bool = False,
    into: Into | None = None,
) -> tuple[Tensor, Tensor]:
    """Blocks along rows: codes ``(M, ceil(K/2))`` and E4M3 scales ``(M, C)``, both bytes.

    Args:
        x_MK: Values.
        amax: Float32 ``(1,)``; ``(G,)`` with ``ends_G``; or ``(M, 1)``, one for each row.
        ends_G: Ends of the groups.
        seed: Int64 ``(2,)``, seed and offset, to round stochastically.
        four_over_six: Bring a block's largest magnitude to 4 or to 6, whichever errs less.
        into: Buffers for codes and scales.
    """
    x_MCB = cut_columns(x_MK.float(), NVFP4_BLOCK)
    amax_M = _row_amax(amax, ends_G, len(x_MK))
    draws = _draws(seed, x_MCB, _ROWS)
    codes_MCB, scales_MC = _quantize(x_MCB, amax_M, draws, four_over_six=four_over_six)
    return written(into, _pack(codes_MCB.flatten(1), x_MK.shape[1]), scales_MC)


def dequantize_nvfp4_rows(
    codes: Tensor,
    scales_MC: Tensor,
    amax: Tensor,
    columns: int,
    dtype: torch.dtype,
    ends_G: Tensor | None = None,
) -> Tensor:
    """Values ``(M, columns)`` of :func:`quantize_nvfp4_rows`."""
    factor_MC = _factor(scales_MC, _row_amax(amax, ends_G, len(codes)))
    column_K = column_blocks(columns, NVFP4_BLOCK, codes.device)
    return (_values(_unpack(codes)[:, :columns]) * factor_MC[:, column_K]).to(dtype)


def quantize_nvfp4_columns(
    x_MK: Tensor,
    amax: Tensor,
    ends_G: Tensor | None = None,
    rotation_BB: Tensor | None = None,
    seed: Tensor | None = None,
    *,
    four_over_six: bool = False,
    into: Into | None = None,
) -> tuple[Tensor, Tensor]:
    """Blocks down columns: transposed codes, flat, and E4M3 scales ``(S, K)``, both bytes.

    ``amax`` is ``(1,)`` or ``(G,)``, or ``(1, K)`` or ``(G, K)`` with one for each column, of
    the rotated values if there is a rotation.  The codes are ``nvfp4_column_bytes`` long;
    those past the last group, and scales of blocks that no group uses, are zero.
    """
    x_SBK = cut_rows(x_MK, NVFP4_BLOCK, ends_G)
    if rotation_BB is not None:
        x_SBK = rotate(x_SBK, rotation_BB)
    x_SKB = x_SBK.transpose(1, 2)
    amax_SK = group_factor(amax, ends_G, len(x_MK))
    draws = _draws(seed, x_SKB, _COLUMNS)
    codes_SKB, scales_SK = _quantize(x_SKB, amax_SK, draws, four_over_six=four_over_six)
    multiple = 2 if rotation_BB is None else NVFP4_BLOCK
    codes = pack_columns(_pairs(codes_SKB), len(x_MK), ends_G, multiple)
    return written(into, codes, scales_SK)


def quantize_nvfp4_both(
    x_MK: Tensor,
    amax: tuple[Tensor, Tensor],
    ends_G: Tensor | None = None,
    rotation_BB: Tensor | None = None,
    seed: Tensor | None = None,
    *,
    four_over_six: bool = False,
    into: Into | None = None,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Codes and scales along rows, and those down columns, which are what may be rotated.

    ``amax`` has one tensor for each direction.  One seed is enough: the two draw from streams
    of their own.
    """
    rows = quantize_nvfp4_rows(x_MK, amax[0], ends_G, seed, four_over_six=four_over_six)
    columns = quantize_nvfp4_columns(
        x_MK, amax[1], ends_G, rotation_BB, seed, four_over_six=four_over_six
    )
    four = written(into, *rows, *columns)
    return four[:2], four[2:]


def dequantize_nvfp4_columns(
    codes: Tensor,
    scales_SK: Tensor,
    amax: Tensor,
    rows: int,
    dtype: torch.dtype,
    ends_G: Tensor | None = None,
    rotation_BB: Tensor | None = None,
) -> Tensor:
    """Values ``(rows, K)`` of :func:`quantize_nvfp4_columns`, rotated back; the tail is zero."""
    multiple = 2 if rotation_BB is None else NVFP4_BLOCK
    bytes_SKP = unpack_columns(codes, scales_SK.shape, rows, ends_G, multiple)
    factor_SK = _factor(scales_SK, group_factor(amax, ends_G, rows))
    values_SBK = (_values(_unpack(bytes_SKP)) * factor_SK[..., None]).transpose(1, 2)
    if rotation_BB is not None:
        values_SBK = rotate_back(values_SBK, rotation_BB)
    row_M, place_M = row_places(ends_G, rows, NVFP4_BLOCK, codes.device)
    values_MK = values_SBK[row_M, place_M]
    return _without_tail(values_MK, ends_G).to(dtype)


def quantize_nvfp4_tiles(
    x_MK: Tensor,
    amax: Tensor,
    ends_G: Tensor | None = None,
    seed: Tensor | None = None,
    *,
    four_over_six: bool = False,
    into: Into | None = None,
) -> tuple[Tensor, Tensor]:
    """Tiles of 16 by 16: codes ``(M, ceil(K/2))`` and E4M3 scales ``(S, C)``, both bytes.

    ``amax`` is ``(1,)``, or ``(G,)`` with ``ends_G``.
    """
    x_SBCB = cut_columns(cut_rows(x_MK, NVFP4_BLOCK, ends_G), NVFP4_BLOCK)
    x_SCBB = x_SBCB.transpose(1, 2)
    amax_S = group_factor(amax, ends_G, len(x_MK))
    x_SCE, draws = x_SCBB.flatten(2), _draws(seed, x_SCBB, _TILES)
    codes_SCE, scales_SC = _quantize(x_SCE, amax_S, draws, four_over_six=four_over_six)
    codes_SBK = codes_SCE.unflatten(2, (NVFP4_BLOCK, -1)).transpose(1, 2).flatten(2)
    row_M, place_M = row_places(ends_G, len(x_MK), NVFP4_BLOCK, x_MK.device)
    return written(into, _pack(codes_SBK[row_M, place_M], x_MK.shape[1]), scales_SC)


def dequantize_nvfp4_tiles(
    codes: Tensor,
    scales_SC: Tensor,
    amax: Tensor,
    columns: int,
    dtype: torch.dtype,
    ends_G: Tensor | None = None,
) -> Tensor:
    """Values ``(M, columns)`` of :func:`quantize_nvfp4_tiles`; the tail is zero."""
    factor_SC = _factor(scales_SC, group_factor(amax, ends_G, len(codes)))
    row_M, _ = row_places(ends_G, len(codes), NVFP4_BLOCK, codes.device)
    column_K = column_blocks(columns, NVFP4_BLOCK, codes.device)
    values_MK = _values(_unpack(codes)[:, :columns]) * factor_SC[row_M[:, None], column_K]
    return _without_tail(values_MK, ends_G).to(dtype)


def _row_amax(amax: Tensor, ends_G: Tensor | None, rows: int) -> Tensor:
    return amax if amax.ndim == 2 else row_factor(amax, ends_G, rows)


def _without_tail(values_MK: Tensor, ends_G: Tensor | None) -> Tensor:
    if ends_G is None:
        return values_MK
    return torch.where(valid(ends_G, len(values_MK)), values_MK, 0.0)


def _draws(seed: Tensor | None, x: Tensor, stream: int) -> Tensor | None:
    """A random byte for each value of ``x``, whose last dimension is 16."""
    if seed is None:
        return None
    draws = random_bytes(seed, x.shape[:-1].numel(), stream).view(x.shape)
    return draws.flatten(2) if stream == _TILES else draws


# --- scales and codes of blocks that lie along the last dimension ------------------------------


def _quantize(
    x: Tensor, amax: Tensor, draws: Tensor | None, *, four_over_six: bool
) -> tuple[Tensor, Tensor]:
    """Codes ``(..., E)``, one a byte, and scales ``(...)`` of blocks ``(..., E)``."""
    block_amax = magnitude(x).amax(-1)
    over_all = _over_all(amax)
    # The product in brackets is formed first.
    scale = _e4m3(block_amax * (over_all * (1.0 / 6.0)))
    if four_over_six:
        sixth = block_amax / torch.full_like(block_amax, 6.0) * over_all
        six, four = _e4m3(sixth), _e4m3(sixth * 1.5)
        errs_less = _error(x, four, amax) < _error(x, six, amax)
        scale = torch.where(errs_less, four, six)
    multiplier = _multiplier(scale, over_all)[..., None]
    codes = _nearest(x * multiplier) if draws is None else _drawn(x * (multiplier * _TINY), draws)
    return codes, scale.to(torch.float8_e4m3fn).view(torch.uint8).contiguous()


def _over_all(amax: Tensor) -> Tensor:
    """The factor that brings ``amax`` to the largest code times the largest scale."""
    factor = (torch.full_like(amax, _LARGEST) / amax).clamp(max=FLOAT32_MAX)
    return torch.where((amax == 0) | (factor == 0), 1.0, factor)


def _e4m3(scale: Tensor) -> Tensor:
    return scale.clamp(max=448.0).to(torch.float8_e4m3fn).float()


def _multiplier(scale: Tensor, over_all: Tensor) -> Tensor:
    """What a value is multiplied by before its cast."""
    product = scale * (torch.ones_like(over_all) / over_all)
    return (torch.ones_like(product) / product).clamp(max=FLOAT32_MAX)


def _factor(scales: Tensor, amax: Tensor) -> Tensor:
    """What a code is multiplied by."""
    return scales.view(torch.float8_e4m3fn).float() * amax * (1.0 / _LARGEST)


def _error(x: Tensor, scale: Tensor, amax: Tensor) -> Tensor:
    """Squared error ``(...)`` of each block, summed along a row, then over rows by halves."""
    codes = _nearest(x * _multiplier(scale, _over_all(amax))[..., None])
    difference = x - _values(codes) * (scale * amax * (1.0 / _LARGEST))[..., None]
    squares = torch.where(difference.isnan(), 0.0, difference * difference)
    squares = squares.unflatten(-1, (-1, NVFP4_BLOCK))
    error = torch.zeros_like(squares[..., 0])
    for square in squares.unbind(-1):
        error = error + square
    while error.shape[-1] > 1:
        half = error.shape[-1] // 2
        error = error[..., :half] + error[..., half:]
    return error.squeeze(-1)


def _nearest(scaled: Tensor) -> Tensor:
    """The nearest code of each value, the even one of two; too large is 6, NaN is 6."""
    size = scaled.abs()
    code = (size > 0.25).byte() + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    code = code + (size > 2.5) + (size >= 3.5) + (size > 5.0)
    return _signed(code, scaled)


def _drawn(tiny: Tensor, draws: Tensor) -> Tensor:
    """One of the two codes around each value, which is 2^-14 of it, the nearer the likelier."""
    # Codes rise by one each half up to 2, each whole up to 4, each two up to 6.  In float64 the
    # sum of where a value lies between codes and of its draw is exact where it matters.
    half = tiny.abs().double() * (0.5 / _TINY)
    place = draws.double() * (1.0 / 256.0)
    for step, height in enumerate((4.0, 2.0, 1.0)):
        place = place + (half - step).clamp(0.0, 1.0) * height
    return _signed(place.floor().nan_to_num(0.0).byte(), tiny)


def _signed(code: Tensor, scaled: Tensor) -> Tensor:
    code = code | scaled.signbit().byte() << 3
    return torch.where(scaled.isnan(), 7, code).byte()


def _values(codes: Tensor) -> Tensor:
    """The value of each nibble as float32."""
    exponent, mantissa = codes.int() >> 1 & 3, codes.int() & 1
    halves = torch.where(exponent == 0, mantissa, (2 + mantissa) << (exponent - 1).clamp(min=0))
    size = halves.float() * 0.5
    return torch.where(codes > 7, -size, size)


def _pack(codes_MK: Tensor, columns: int) -> Tensor:
    """Bytes ``(M, ceil(columns/2))`` of nibbles in whole blocks."""
    return _pairs(codes_MK)[:, : -(-columns // 2)].contiguous()


def _pairs(codes: Tensor) -> Tensor:
    even, odd = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return even | odd << 4


def _unpack(pairs: Tensor) -> Tensor:
    return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2)
