"""The three products of a layer on operands that may be codes, and what multiplies them.

An operand is a plain tensor, or a :class:`~backstash.tensors.QuantizedTensor` that can be read
along the one direction its product adds up over.  :func:`choose` looks at the two formats, the
sizes, the dtype and the device's compute capability, and at nothing else: it is a table, so a
path is never tried to see whether it fails.  Where nothing multiplies the codes, operands are
decoded and multiplied in the layer's dtype: the same values, without the speed.

Letters: T rows, K input features, N output features, G groups.
"""

from __future__ import annotations

import dataclasses
import enum

import torch
import torch.nn.functional as F
from torch import Tensor

from backstash import kernels
from backstash.formats import Format
from backstash.recipes.products import Product
from backstash.tensors import QuantizedTensor


class Path(enum.Enum):
    """What multiplies two operands."""

    #: A matmul of plain values; what is quantized is decoded first.
    VALUES = "values"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matmul:
    """All that the choice of a path depends on.

    Attributes:
        product: Which of the three.
        formats: Of the operands as ``product`` lists them, along the direction it reads; None
            for plain values.
        sizes: T, K and N.
        groups: How many groups the rows are in; None for one weight.
        dtype: Of the result.
        capability: The GPU's compute capability; None on a CPU.
    """

    product: Product
    formats: tuple[Format | None, Format | None]
    sizes: tuple[int, int, int]
    groups: int | None
    dtype: torch.dtype
    capability: tuple[int, int] | None


def choose(matmul: Matmul) -> Path:
    """What multiplies the operands."""
    return Path.VALUES


def output(
    x: Tensor, w: Tensor, bias: Tensor | None, dtype: torch.dtype, ends_G: Tensor | None
) -> Tensor:
    """``x w^T + bias`` ``(T, N)``, from rows ``(T, K)`` and a weight ``(N, K)`` or ``(G, N, K)``.

    With groups each row meets its own group's weight and bias, and the tail is zeros.
    """
    x, w = values(x, dtype), values(w, dtype)
    if ends_G is None:
        return F.linear(x, w, bias)
    y_TN = kernels.grouped_mm(x, w, ends_G)
    return y_TN if bias is None else kernels.add_group_bias(y_TN, bias, ends_G)


def input_gradient(dy: Tensor, w: Tensor, dtype: torch.dtype, ends_G: Tensor | None) -> Tensor:
    """``dy w`` as ``(T, K)``, from rows ``(T, N)`` and a weight ``(N, K)`` or ``(G, N, K)``."""
    dy, w = values(dy, dtype), values(w, dtype)
    return dy @ w if ends_G is None else kernels.grouped_mm_dx(dy, w, ends_G)


def weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype, ends_G: Tensor | None) -> Tensor:
    """``dy^T x`` as ``(N, K)``, or as ``(G, N, K)`` of each group's rows; zeros for no rows."""
    dy, x = values(dy, dtype), values(x, dtype)
    return dy.t() @ x if ends_G is None else kernels.grouped_mm_dw(dy, x, ends_G)


def values(operand: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of an operand, decoded if need be."""
    plain = operand.dequantize() if isinstance(operand, QuantizedTensor) else operand
    return plain if plain.dtype == dtype else plain.to(dtype)
