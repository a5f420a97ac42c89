"""Matrix multiplication that reads codes: the three products of a layer on quantized operands.

An operand is the buffers of one direction of a blockwise format, as plain tensors, and what
they say of the matrix.  The meaning of a product is: dequantize both operands in float32,
multiply in float32, round once.  A fast twin multiplies what it has just read and never
writes a dequantized copy to memory.

Both operands must have their blocks along what the product adds up over, or tiles, which
serve both directions::

    y  = x w^T       blocks of x along rows,     of w along rows
    dx = dy w        blocks of dy along rows,    of w down columns
    dw = dy^T x      blocks of dy down columns,  of x down columns

Letters: T rows of the buffer, K input features, N output features, G groups, S blocks of
rows, C blocks of columns.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch
from torch import Tensor

from backstash.errors import DtypeError, LayoutError, ShapeError
from backstash.kernels.reference import cast, float8_block, nvfp4
from backstash.kernels.reference import grouped_mm as plain
from backstash.kernels.reference.hadamard import hadamard_matrix


class Blocks(enum.Enum):
    """Where the values lie that share a scale."""

    ROWS = "along rows"
    COLUMNS = "down columns"
    TILES = "in tiles"


class Codes(NamedTuple):
    """One operand of a product: what a quantizer of :mod:`backstash.kernels` returned.

    ``amax`` and the dtype of ``scales`` tell the format: NVFP4 has an ``amax``, blocks of 128
    have scales in float32, and MXFP8 has neither.

    Attributes:
        codes: MXFP8 and blocks of 128: ``(M, K)`` in ``float8_e4m3fn`` or ``float8_e5m2``, a
            view of the bytes.  NVFP4: bytes, ``(M, ceil(K/2))`` or, down columns, transposed
            and of any shape.
        scales: The exponents, the inverse float32 scales or the E4M3 bytes that came with the
            codes: ``(M, C)`` along rows, ``(S, K)`` down columns, ``(S, C)`` in tiles.
        shape: Rows M and columns K of the matrix.  A weight of G groups is the matrix of its
            ``G N`` rows, quantized with groups of N rows each.
        blocks: The direction.
        amax: NVFP4: float32 ``(1,)``, ``(G,)``, along rows also ``(M, 1)``, down columns also
            ``(1, K)`` or ``(G, K)``.
        is_rotated: NVFP4 down columns: the values were transformed by ``hadamard_matrix``.
    """

    codes: Tensor
    scales: Tensor
    shape: tuple[int, int]
    blocks: Blocks
    amax: Tensor | None = None
    is_rotated: bool = False


def quantized_mm(x_TK: Codes, w_NK: Codes, ends_G: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply rows by a weight: ``y_TN = x_TK w_NK^T``, or each row by its group's weight.

    Args:
        x_TK: Blocks along rows, or tiles.
        w_NK: Blocks along rows, or tiles.  With ``ends_G`` it has ``G N`` rows.
        ends_G: Ends of the groups of rows, int32; None for one matrix.  Rows past the last end
            are not read, and are exact zeros in the result.
        dtype: Of the result; the product is added up in float32 and rounded once.

    Raises:
        LayoutError: Blocks do not lie along what the product adds up over.
        ShapeError: The shapes do not fit each other.
        DtypeError: Codes are not of float8, or ``ends_G`` are no int32 or int64.
    """
    check_mm("quantized_mm", x_TK, w_NK, ends_G)
    x, w_GNK = _values(x_TK, ends_G, dtype), _weight_values(w_NK, ends_G, dtype)
    if ends_G is None:
        return (x @ w_GNK[0].t()).to(dtype)
    return plain.grouped_mm(x, w_GNK, ends_G).to(dtype)


def quantized_mm_dx(dy_TN: Codes, w_NK: Codes, ends_G: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Give the gradient of the rows: ``dx_TK = dy_TN w_NK``, each row with its group's weight.

    Args:
        dy_TN: Blocks along rows, or tiles.
        w_NK: Blocks down columns, or tiles.  With ``ends_G`` it has ``G N`` rows.
        ends_G: As in :func:`quantized_mm`.
        dtype: Of the result.

    Raises:
        LayoutError: Blocks do not lie along what the product adds up over.
        ShapeError: The shapes do not fit each other.
        DtypeError: Codes are not of float8, or ``ends_G`` are no int32 or int64.
    """
    check_dx("quantized_mm_dx", dy_TN, w_NK, ends_G)
    dy, w_GNK = _values(dy_TN, ends_G, dtype), _weight_values(w_NK, ends_G, dtype)
    if ends_G is None:
        return (dy @ w_GNK[0]).to(dtype)
    return plain.grouped_mm_dx(dy, w_GNK, ends_G).to(dtype)


def quantized_mm_dw(dy_TN: Codes, x_TK: Codes, ends_G: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Give the gradient of the weight: ``dw_NK = dy_TN^T x_TK``, or ``dw_GNK`` of each group.

    Args:
        dy_TN: Blocks down columns, or tiles.
        x_TK: Blocks down columns, or tiles.
        ends_G: As in :func:`quantized_mm`; a group without rows gets exact zeros.
        dtype: Of the result.

    Raises:
        LayoutError: Blocks do not lie along what the product adds up over.
        ShapeError: The shapes do not fit each other.
        DtypeError: Codes are not of float8, or ``ends_G`` are no int32 or int64.
    """
    check_dw("quantized_mm_dw", dy_TN, x_TK, ends_G)
    dy, x = _values(dy_TN, ends_G, dtype), _values(x_TK, ends_G, dtype)
    if ends_G is None:
        return (dy.t() @ x).to(dtype)
    return plain.grouped_mm_dw(dy, x, ends_G).to(dtype)


def check_mm(kernel: str, x_TK: Codes, w_NK: Codes, ends_G: Tensor | None) -> None:
    """Refuse operands of a product over K that do not fit."""
    _check_operands(kernel, (x_TK, Blocks.ROWS), (w_NK, Blocks.ROWS), ends_G)
    _check_weight(kernel, w_NK, ends_G)
    if x_TK.shape[1] != w_NK.shape[1]:
        raise ShapeError(
            f"{kernel} needs rows of the length of the weight's, got matrices {x_TK.shape} and "
            f"{w_NK.shape}; give (T, K) and (N, K)"
        )


def check_dx(kernel: str, dy_TN: Codes, w_NK: Codes, ends_G: Tensor | None) -> None:
    """Refuse operands of a product over N that do not fit."""
    _check_operands(kernel, (dy_TN, Blocks.ROWS), (w_NK, Blocks.COLUMNS), ends_G)
    groups = _check_weight(kernel, w_NK, ends_G)
    if dy_TN.shape[1] * groups != w_NK.shape[0]:
        raise ShapeError(
            f"{kernel} needs rows of the weight for each column of the gradient, in {groups} "
            f"groups, got matrices {dy_TN.shape} and {w_NK.shape}; give (T, N) and (G N, K)"
        )


def check_dw(kernel: str, dy_TN: Codes, x_TK: Codes, ends_G: Tensor | None) -> None:
    """Refuse operands of a product over T that do not fit."""
    _check_operands(kernel, (dy_TN, Blocks.COLUMNS), (x_TK, Blocks.COLUMNS), ends_G)
    if dy_TN.shape[0] != x_TK.shape[0]:
        raise ShapeError(
            f"{kernel} needs the gradient and the input of the same rows, got matrices "
            f"{dy_TN.shape} and {x_TK.shape}; give (T, N) and (T, K)"
        )


def _check_operands(
    kernel: str, a: tuple[Codes, Blocks], b: tuple[Codes, Blocks], ends_G: Tensor | None
) -> None:
    if ends_G is not None:
        plain.check_ends(kernel, ends_G)
    for operand, wanted in (a, b):
        if operand.blocks not in (wanted, Blocks.TILES):
            raise LayoutError(
                f"{kernel} adds up over blocks {wanted.value}, got blocks {operand.blocks.value}; "
                f"quantize that operand for the other direction"
            )
        if operand.amax is None and operand.codes.dtype not in _CODE_DTYPES:
            raise DtypeError(
                f"{kernel} needs codes in float8_e4m3fn or float8_e5m2, got "
                f"{operand.codes.dtype}; view the bytes as what they are"
            )


def _check_weight(kernel: str, w_NK: Codes, ends_G: Tensor | None) -> int:
    groups = 1 if ends_G is None else len(ends_G)
    if w_NK.shape[0] % max(groups, 1):
        raise ShapeError(
            f"{kernel} needs a weight with as many rows in each of {groups} groups, got "
            f"{w_NK.shape[0]} rows; give it as a matrix of G N rows"
        )
    return groups


_CODE_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def _weight_values(w_NK: Codes, ends_G: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``(G, N, K)``; the blocks and scales of a weight start anew in each group."""
    groups = 1 if ends_G is None else len(ends_G)
    rows = w_NK.shape[0] // max(groups, 1)
    if ends_G is not None:
        ends_G = rows * torch.arange(1, groups + 1, device=ends_G.device, dtype=torch.int32)
    return _values(w_NK, ends_G, dtype).view(groups, rows, w_NK.shape[1])


def _values(operand: Codes, ends_G: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The values ``(M, K)``, wide: in float64 if that is the dtype of the product."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    if operand.amax is not None:
        return _nvfp4_values(operand, operand.amax, ends_G, wide)
    codes, scales = operand.codes, operand.scales
    if scales.dtype is torch.float32:
        dtypes = codes.dtype, wide
        if operand.blocks is Blocks.ROWS:
            return float8_block.dequantize_block_rows(codes, scales, *dtypes)
        if operand.blocks is Blocks.COLUMNS:
            return float8_block.dequantize_block_columns(codes, scales, *dtypes, ends_G)
        return float8_block.dequantize_block_tiles(codes, scales, *dtypes, ends_G)
    if operand.blocks is Blocks.ROWS:
        return cast.dequantize_mx_rows(codes, scales, wide)
    if operand.blocks is Blocks.COLUMNS:
        return cast.dequantize_mx_columns(codes, scales, wide, ends_G)
    return cast.dequantize_mx_tiles(codes, scales, wide, ends_G)


def _nvfp4_values(operand: Codes, amax: Tensor, ends_G: Tensor | None, wide: torch.dtype) -> Tensor:
    codes, scales, (rows, columns) = operand.codes, operand.scales, operand.shape
    if operand.blocks is Blocks.ROWS:
        return nvfp4.dequantize_nvfp4_rows(codes, scales, amax, columns, wide, ends_G)
    if operand.blocks is Blocks.TILES:
        return nvfp4.dequantize_nvfp4_tiles(codes, scales, amax, columns, wide, ends_G)
    rotation = hadamard_matrix(codes.device) if operand.is_rotated else None
    return nvfp4.dequantize_nvfp4_columns(
        codes.flatten(), scales, amax, rows, wide, ends_G, rotation
    )
