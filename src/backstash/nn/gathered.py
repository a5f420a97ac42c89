"""Rows that are copies of tokens, made a few columns at a time where that is enough.

A token goes to several experts, so the rows of all of them are several times the tokens: the
largest matrices of a layer, and each is read by one product and gone.  A product that adds up over
the rows can be made a few columns at a time, and so can one that is added up over each token's
rows.  Each number of the result is the same sum over the same terms in the same order, so pieces
change nothing but the memory that is needed.

Letters: T tokens, R rows, H features of either, N and K columns of the two operands of a weight
gradient, G groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from backstash import kernels

# The most bytes of copies beside the gradient of a weight, which is large itself, and elsewhere,
# where fewer and larger pieces read the other operand less often.
_BESIDE_WEIGHTS, _ELSEWHERE = 2**27, 2**29
# Whole tiles of the matmuls.
_UNIT = 256


@dataclasses.dataclass(frozen=True, eq=False)
class Gathered:
    """The matrix whose row ``r`` is ``values_TH[source_R[r]]``, in plain values."""

    values_TH: Tensor
    source_R: Tensor

    @property
    def shape(self) -> torch.Size:
        """``(R, H)``."""
        return torch.Size((len(self.source_R), self.values_TH.shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        return self.values_TH.dtype

    def columns(self, piece: slice) -> Tensor:
        """Some columns of all rows."""
        return kernels.permute(self.values_TH[:, piece], self.source_R)

    def matrix(self) -> Tensor:
        """All of it."""
        return kernels.permute(self.values_TH, self.source_R)


def matrix(x: Tensor | Gathered) -> Tensor:
    """Gathered rows as one matrix; a tensor as it is."""
    return x.matrix() if isinstance(x, Gathered) else x


def weight_gradient(dy_RN: Tensor | Gathered, x_RK: Tensor | Gathered, ends_G: Tensor) -> Tensor:
    """``dy^T x`` of each group ``(G, N, K)``, from plain values of which one side is gathered."""
    groups, N, K = len(ends_G), dy_RN.shape[1], x_RK.shape[1]
    dw_GNK = torch.empty(groups, N, K, dtype=x_RK.dtype, device=ends_G.device)
    if isinstance(dy_RN, Gathered):
        x_RK = matrix(x_RK)
        for piece in _column_pieces(dy_RN):
            kernels.grouped_mm_dw(dy_RN.columns(piece), x_RK, ends_G, dw_GNK[:, piece])
    elif isinstance(x_RK, Gathered):
        for piece in _column_pieces(x_RK):
            kernels.grouped_mm_dw(dy_RN, x_RK.columns(piece), ends_G, dw_GNK[:, :, piece])
    else:
        kernels.grouped_mm_dw(dy_RN, x_RK, ends_G, dw_GNK)
    return dw_GNK


def token_gradient(dy_RN: Tensor, w_GNK: Tensor, ends_G: Tensor, slots_TK: Tensor) -> Tensor:
    """``dy w`` of each row, added up over each token's rows ``(T, K)``, from plain values."""
    rows, columns = len(dy_RN), w_GNK.shape[2]
    dx_TK = dy_RN.new_empty(len(slots_TK), columns)
    for piece in _pieces(columns, rows * dy_RN.dtype.itemsize, _ELSEWHERE):
        dx_RP = kernels.grouped_mm_dx(dy_RN, w_GNK[:, :, piece], ends_G)
        kernels.unpermute(dx_RP, slots_TK, out=dx_TK[:, piece])
        # Before the next one is made.
        del dx_RP
    return dx_TK


def _column_pieces(x: Gathered) -> Iterator[slice]:
    rows, columns = x.shape
    return _pieces(columns, rows * x.dtype.itemsize, _BESIDE_WEIGHTS)


def _pieces(columns: int, column_bytes: int, most_bytes: int) -> Iterator[slice]:
    """Cut columns into pieces; at least one, also of nothing."""
    fitting = most_bytes // max(column_bytes, 1)
    step = max(fitting // _UNIT * _UNIT, _UNIT)
    for start in range(0, max(columns, 1), step):
        yield slice(start, min(start + step, columns))
