"""Rows that are copies of tokens, which are made only where nothing reads the tokens themselves.

A token goes to several experts, so the rows of all of them are several times the tokens: they
would be the largest matrices of a layer.  Products of plain values take the tokens and the map
(``kernels.gathered_mm`` and its gradients).  What comes out of a product and is added up over each
token's rows is made some columns at a time: the same sums in the same order, in less memory.

Letters: T tokens, R rows, H features of either, N and K columns of the two operands of a weight
gradient, G groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from backstash import kernels
from backstash.kernels import InPages
from backstash.tensors import QuantizedTensor

# The most bytes of rows that are there at a time; each piece reads the other operand again.
_PIECE_BYTES = 2**29
# Whole tiles of the matmuls.
_UNIT = 256


@dataclasses.dataclass(frozen=True, eq=False)
class Gathered:
    """The matrix whose row ``r`` is ``values_TH[source_R[r]]``.

    Plain values, or codes of rows with a scale for each.
    """

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

    def matrix(self) -> Tensor:
        """All of it."""
        tokens, source_R = self.values_TH, self.source_R
        if not isinstance(tokens, QuantizedTensor):
            return kernels.permute(tokens, source_R)
        buffers = {name: kernels.permute(held, source_R) for name, held in tokens.buffers.items()}
        return tokens.like(buffers, shape=self.shape)


def matrix(x: Tensor | Gathered) -> Tensor:
    """Gathered rows as one matrix; a tensor as it is."""
    return x.matrix() if isinstance(x, Gathered) else x


def weight_gradient(
    dy_RN: Tensor | Gathered, x_RK: Tensor | Gathered | InPages, ends_G: Tensor
) -> Tensor:
    """``dy^T x`` of each group ``(G, N, K)``, from plain values.

    Of one side rows are gathered, or those of ``x`` are in pages.
    """
    if isinstance(x_RK, InPages):
        return kernels.grouped_mm_dw_of_pages(matrix(dy_RN), x_RK, ends_G)
    if isinstance(dy_RN, Gathered):
        values_TN, source_R = dy_RN.values_TH, dy_RN.source_R
        return kernels.gathered_mm_dw_of_output(values_TN, matrix(x_RK), ends_G, source_R)
    if isinstance(x_RK, Gathered):
        return kernels.gathered_mm_dw_of_input(dy_RN, x_RK.values_TH, ends_G, x_RK.source_R)
    return kernels.grouped_mm_dw(dy_RN, x_RK, ends_G)


def token_gradient(dy_RN: Tensor, w_GNK: Tensor, ends_G: Tensor, slots_TK: Tensor) -> Tensor:
    """``dy w`` of each row, added up over each token's rows ``(T, K)``, from plain values."""
    rows, columns = len(dy_RN), w_GNK.shape[2]
    dx_TK = dy_RN.new_empty(len(slots_TK), columns)
    for piece in _pieces(columns, rows * dy_RN.dtype.itemsize):
        dx_RP = kernels.grouped_mm_dx(dy_RN, w_GNK[:, :, piece], ends_G)
        kernels.unpermute(dx_RP, slots_TK, out=dx_TK[:, piece])
        # Before the next one is made.
        del dx_RP
    return dx_TK


def _pieces(columns: int, column_bytes: int) -> Iterator[slice]:
    """Cut columns into pieces; at least one, also of nothing."""
    fitting = _PIECE_BYTES // max(column_bytes, 1)
    step = max(fitting // _UNIT * _UNIT, _UNIT)
    for start in range(0, max(columns, 1), step):
        yield slice(start, min(start + step, columns))
