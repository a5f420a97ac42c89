"""Products of float8 codes whose scales leave the sum, as a matrix unit takes them.

A scale that all codes share which a product adds up over (that of a tensor, a row, or a column
of a group) can be multiplied onto the finished sum, so the unit multiplies bare codes.  It
wants both operands with the dimension it adds up over last in memory, and that dimension in
whole units of 16; the codes of the weight gradient are transposed for it by
:func:`transpose_groups`, which pads every group inside.

The meaning of a product is: decode in float32, multiply in float32, round once.  A matrix unit
adds up with fewer bits; by how many is in the documentation of the recipes.

Letters: M and C rows of the operands, J what is added up over, T rows of a buffer, K and N
features, G groups, P columns with padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from backstash.kernels.reference.gathered_mm import check_source
from backstash.kernels.reference.grouped_mm import grouped_mm, grouped_mm_dw, row_groups

#: Codes that a product adds up over come in multiples of this.
FLOAT8_UNIT = 16


class Scaled(NamedTuple):
    """Float8 codes ``(M, J)`` or ``(G, C, J)``, and the inverse scales that are not along J."""

    codes: Tensor
    scale_inv: Tensor


def float8_mm(
    a: Scaled,
    b: Scaled,
    bias_C: Tensor | None,
    dtype: torch.dtype,
    *,
    fast_accumulation: bool = False,
) -> Tensor:
    """``a b^T + bias`` as ``(M, C)`` in ``dtype``.

    Args:
        a: Codes ``(M, J)`` and inverse scales ``(1,)``, or ``(M, 1)`` for rows.
        b: Codes ``(C, J)`` and inverse scales ``(1,)``, or ``(C, 1)`` for rows.
        bias_C: In ``dtype``, or None.
        dtype: bfloat16, float16 or float32; the definition adds up in float64 for float64.
        fast_accumulation: A matrix unit may keep the whole sum in its own narrow register.
    """
    wide = torch.promote_types(dtype, torch.float32)
    y_MC = _values(a, wide) @ _values(b, wide).t()
    return (y_MC if bias_C is None else y_MC + bias_C.to(wide)).to(dtype)


def float8_grouped_mm(
    a: Scaled, b: Scaled, ends_G: Tensor, dtype: torch.dtype, *, fast_accumulation: bool = False
) -> Tensor:
    """Each row times its own group's ``b^T``: ``(T, C)`` in ``dtype``; the tail is zeros.

    Args:
        a: Codes ``(T, J)`` and inverse scales ``(T,)``.
        b: Codes ``(G, C, J)`` and inverse scales ``(G, C)``.
        ends_G: Ends of the groups of rows; rows past the last are not read.
        dtype: As in :func:`float8_mm`.
        fast_accumulation: As in :func:`float8_mm`.
    """
    return grouped_mm(_values(a), _values(b), ends_G).to(dtype)


def float8_gathered_mm(
    a: Scaled,
    b: Scaled,
    ends_G: Tensor,
    source_R: Tensor,
    dtype: torch.dtype,
    *,
    fast_accumulation: bool = False,
) -> Tensor:
    """Each row's token times the row's own group's ``b^T``: ``(R, C)`` in ``dtype``.

    :func:`float8_grouped_mm` of rows that are copies of tokens: row r is that of
    ``source_R[r]`` in ``a``, codes ``(T, J)`` and inverse scales ``(T,)`` of tokens.

    Raises:
        ShapeError, DtypeError: ``source_R`` are no integers ``(R,)``.
    """
    check_source(source_R)
    a = Scaled(a.codes.view(torch.uint8)[source_R].view(a.codes.dtype), a.scale_inv[source_R])
    return float8_grouped_mm(a, b, ends_G, dtype, fast_accumulation=fast_accumulation)


def float8_grouped_mm_dw(
    dy: Scaled, x: Scaled, padded_ends_G: Tensor, dtype: torch.dtype
) -> Tensor:
    """``dy x^T`` over each group's columns: ``(G, N, K)``; zeros for an empty group.

    Args:
        dy: Codes ``(N, P)`` of :func:`transpose_groups` and inverse scales ``(G, N)``.
        x: Codes ``(K, P)`` of the same and inverse scales ``(G, K)``.
        padded_ends_G: The ends that came with the codes.
        dtype: As in :func:`float8_mm`.
    """
    dw_GNK = grouped_mm_dw(dy.codes.float().t(), x.codes.float().t(), padded_ends_G)
    return (dw_GNK * dy.scale_inv.unsqueeze(2) * x.scale_inv.unsqueeze(1)).to(dtype)


def transpose_groups(codes_TK: Tensor, ends_G: Tensor) -> tuple[Tensor, Tensor]:
    """Transposed codes, each group beginning at a whole unit.

    Args:
        codes_TK: One-byte codes, ``uint8`` or float8; the tail is not read.
        ends_G: Ends of the groups.

    Returns:
        Codes ``(K, P)`` with zeros between a group's last row and the next unit, one unit of
        them for an empty group, and the int32 ends ``(G,)`` of the padded groups.  P is
        ``padded_columns(T, G)``; what lies past the last end is unspecified.
    """
    rows, groups = len(codes_TK), len(ends_G)
    padded_G = padded_ends(ends_G, rows)
    starts_G = F.pad(ends_G.clamp(0, rows)[:-1], (1, 0))
    padded_starts_G = F.pad(padded_G[:-1], (1, 0))
    column_P = torch.arange(padded_columns(rows, groups), device=codes_TK.device)
    group_P = row_groups(padded_G, len(column_P)).clamp(max=groups - 1)
    row_P = column_P - padded_starts_G[group_P] + starts_G[group_P]
    row_P = torch.where(row_P < ends_G.clamp(0, rows)[group_P], row_P, rows)
    # A row of zeros stands for every column that no row of a group fills.
    rows_and_zeros = F.pad(codes_TK.view(torch.uint8), (0, 0, 0, 1))
    transposed_KP = rows_and_zeros.index_select(0, row_P).t().contiguous()
    return transposed_KP.view(codes_TK.dtype), padded_G


def padded_columns(rows: int, groups: int) -> int:
    """As many columns as padded groups of ``rows`` rows can have, in whole units."""
    return -(-rows // FLOAT8_UNIT) * FLOAT8_UNIT + groups * FLOAT8_UNIT


def padded_ends(ends_G: Tensor, rows: int) -> Tensor:
    """Where each group ends after padding: int32, at least one unit for each."""
    counts_G = ends_G.clamp(0, rows).diff(prepend=ends_G.new_zeros(1)).clamp(min=1)
    units_G = (counts_G + FLOAT8_UNIT - 1) // FLOAT8_UNIT
    return (units_G * FLOAT8_UNIT).cumsum(0).int()


def _values(operand: Scaled, wide: torch.dtype = torch.float32) -> Tensor:
    codes, scale_inv = operand
    if scale_inv.ndim == codes.ndim - 1 and scale_inv.shape == codes.shape[:-1]:
        scale_inv = scale_inv.unsqueeze(-1)
    return codes.to(wide) * scale_inv
