"""The three products of a layer on operands that may be codes, and what multiplies them.

An operand is a plain tensor, or a :class:`~backstash.tensors.QuantizedTensor` that can be read
along the one direction its product adds up over.  :func:`choose` looks at the two formats, the
sizes, the dtype and the device's compute capability, and at nothing else: it is a table, so a
path is never tried to see whether it fails.  Where nothing multiplies the codes, operands are
decoded and multiplied in the layer's dtype: the same values, without the speed.

A float8 matrix unit adds up in a register of its own, of fewer bits than float32.  In forward
the whole sum may stay there, which is fastest: an output is rounded to a layer's dtype anyway,
and its error is one of many that training averages over.  The sums of gradients run over tens
of thousands of rows of both signs, where small parts that are cut off do not average out, so
there the register is emptied into float32 every 128 products.

Letters: T rows, K input features, N output features, G groups.
"""

from __future__ import annotations

import dataclasses
import enum

import torch
import torch.nn.functional as F
from torch import Tensor

from backstash import kernels
from backstash.formats import Code, Float8Current, Float8Delayed, Float8Rowwise, Format, Usage
from backstash.kernels import FLOAT8_UNIT, Scaled
from backstash.recipes.products import Product
from backstash.tensors import QuantizedTensor


class Path(enum.Enum):
    """What multiplies two operands."""

    #: A matmul of plain values; what is quantized is decoded first.
    VALUES = "decoded, then multiplied in the layer's dtype"
    #: Torch's float8 matmuls: scales are multiplied onto the finished sum.
    FLOAT8 = "float8 matrix units"


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


# The first capabilities whose units take a scale for a tensor, and one for each row; and the
# one generation for which torch has a grouped float8 matmul, with the fewest groups it refuses.
_TENSOR_SCALES, _ROW_SCALES, _GROUPED_MAJOR = (8, 9), (9, 0), 9
_TOO_MANY_GROUPS = 1024
_DENSE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def choose(matmul: Matmul) -> Path:
    """What multiplies the operands."""
    return Path.FLOAT8 if _float8_unit_fits(matmul) else Path.VALUES


def _float8_unit_fits(matmul: Matmul) -> bool:
    _, K, N = matmul.sizes
    if matmul.capability is None or 0 in matmul.sizes or K % FLOAT8_UNIT or N % FLOAT8_UNIT:
        return False
    codes: set[Code] = set()
    has_rows = False
    for format in matmul.formats:
        if not isinstance(format, Float8Current | Float8Delayed | Float8Rowwise):
            return False
        codes.add(format.code)
        has_rows = has_rows or isinstance(format, Float8Rowwise)
    if matmul.groups is not None:
        is_fit = codes == {Code.E4M3} and matmul.groups < _TOO_MANY_GROUPS
        has_unit = matmul.capability[0] == _GROUPED_MAJOR
        return has_unit and is_fit and matmul.dtype is torch.bfloat16
    if matmul.dtype not in _DENSE_DTYPES:
        return False
    if has_rows:
        return matmul.capability >= _ROW_SCALES and codes == {Code.E4M3}
    # No unit multiplies E5M2 by E5M2.
    return matmul.capability >= _TENSOR_SCALES and codes != {Code.E5M2}


def output(
    x: Tensor, w: Tensor, bias: Tensor | None, dtype: torch.dtype, ends_G: Tensor | None
) -> Tensor:
    """``x w^T + bias`` ``(T, N)``, from rows ``(T, K)`` and a weight ``(N, K)`` or ``(G, N, K)``.

    With groups each row meets its own group's weight and bias, and the tail is zeros.
    """
    sizes = x.shape[0], x.shape[1], w.shape[-2]
    path = _path(Product.OUTPUT, (x, w), sizes, dtype, ends_G)
    if ends_G is None:
        if path is Path.VALUES:
            return F.linear(values(x, dtype), values(w, dtype), bias)
        rows = _scaled(x, Usage.ROWWISE), _scaled(w, Usage.ROWWISE)
        return kernels.float8_mm(*rows, bias, dtype, fast_accumulation=True)
    if path is Path.VALUES:
        y_TN = kernels.grouped_mm(values(x, dtype), values(w, dtype), ends_G)
    else:
        rows = _grouped_rows(x, ends_G), _grouped_weight(w, Usage.ROWWISE)
        y_TN = kernels.float8_grouped_mm(*rows, ends_G, fast_accumulation=True)
    return y_TN if bias is None else kernels.add_group_bias(y_TN, bias, ends_G)


def input_gradient(dy: Tensor, w: Tensor, dtype: torch.dtype, ends_G: Tensor | None) -> Tensor:
    """``dy w`` as ``(T, K)``, from rows ``(T, N)`` and a weight ``(N, K)`` or ``(G, N, K)``."""
    sizes = dy.shape[0], w.shape[-1], w.shape[-2]
    path = _path(Product.INPUT_GRADIENT, (dy, w), sizes, dtype, ends_G)
    if path is Path.VALUES:
        dy, w = values(dy, dtype), values(w, dtype)
        return dy @ w if ends_G is None else kernels.grouped_mm_dx(dy, w, ends_G)
    if ends_G is None:
        return kernels.float8_mm(_scaled(dy, Usage.ROWWISE), _turned(w), None, dtype)
    weight = _grouped_weight(w, Usage.COLUMNWISE)
    return kernels.float8_grouped_mm(_grouped_rows(dy, ends_G), weight, ends_G)


def weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype, ends_G: Tensor | None) -> Tensor:
    """``dy^T x`` as ``(N, K)``, or as ``(G, N, K)`` of each group's rows; zeros for no rows."""
    sizes = dy.shape[0], x.shape[1], dy.shape[1]
    path = _path(Product.WEIGHT_GRADIENT, (dy, x), sizes, dtype, ends_G)
    if path is Path.VALUES:
        dy, x = values(dy, dtype), values(x, dtype)
        return dy.t() @ x if ends_G is None else kernels.grouped_mm_dw(dy, x, ends_G)
    if ends_G is None:
        return kernels.float8_mm(_turned(dy), _turned(x), None, dtype)
    (dy_NP, padded_G), (x_KP, _) = (_turned_groups(operand, ends_G) for operand in (dy, x))
    return kernels.float8_grouped_mm_dw(dy_NP, x_KP, padded_G)


def values(operand: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of an operand, decoded if need be."""
    plain = operand.dequantize() if isinstance(operand, QuantizedTensor) else operand
    return plain if plain.dtype == dtype else plain.to(dtype)


def _path(
    product: Product,
    operands: tuple[Tensor, Tensor],
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    ends_G: Tensor | None,
) -> Path:
    device = operands[0].device
    one, other = (
        _format_along(operand, usage)
        for operand, (_, usage) in zip(operands, product.value, strict=True)
    )
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    groups = None if ends_G is None else len(ends_G)
    matmul = Matmul(
        product=product,
        formats=(one, other),
        sizes=sizes,
        groups=groups,
        dtype=dtype,
        capability=capability,
    )
    return choose(matmul)


def _format_along(operand: Tensor, usage: Usage) -> Format | None:
    """The format whose codes the product can read; None for values, also of the other direction."""
    if not isinstance(operand, QuantizedTensor):
        return None
    readable = usage in operand.usage or operand.format.serves_both
    return operand.format.along(usage) if readable else None


def _scaled(operand: Tensor, usage: Usage) -> Scaled:
    """Float8 codes in the matrix's own order, and their inverse scales as their format has them."""
    assert isinstance(operand, QuantizedTensor), "only quantized operands have codes"
    format = operand.format.along(usage)
    assert isinstance(format, Float8Current | Float8Delayed | Float8Rowwise), "chosen for float8"
    buffers = operand.format.buffers_along(operand.buffers, usage)
    if not isinstance(format, Float8Rowwise):
        prefix = ""
    else:
        prefix = "row_" if usage is Usage.ROWWISE else "column_"
    codes = buffers[prefix + "codes"].view(format.code.dtype)
    return Scaled(codes.view(operand.shape), buffers[prefix + "scale_inv"])


def _turned(operand: Tensor) -> Scaled:
    """The columns of a matrix as rows, in whole units, and their inverse scales."""
    codes, scale_inv = _scaled(operand, Usage.COLUMNWISE)
    turned = kernels.transpose_codes(codes)
    if missing := -turned.shape[1] % FLOAT8_UNIT:
        turned = F.pad(turned.view(torch.uint8), (0, missing)).view(codes.dtype)
    return Scaled(turned, scale_inv.view(-1, 1) if scale_inv.ndim == 2 else scale_inv)


def _grouped_rows(operand: Tensor, ends_G: Tensor) -> Scaled:
    """Rows of groups, with an inverse scale for each row also where a group shares one."""
    codes, scale_inv = _scaled(operand, Usage.ROWWISE)
    if scale_inv.ndim == 2:
        return Scaled(codes, scale_inv.flatten())
    group_T = kernels.row_groups(ends_G, len(codes)).clamp(max=len(ends_G) - 1)
    return Scaled(codes, scale_inv.index_select(0, group_T))


def _grouped_weight(operand: Tensor, usage: Usage) -> Scaled:
    """Each group's weight with what is added up over last, and an inverse scale for each row."""
    codes, scale_inv = _scaled(operand, usage)
    if usage is Usage.COLUMNWISE:
        codes = kernels.transpose_codes(codes)
    return Scaled(codes, _scales_of_lines(scale_inv, *codes.shape[:2]))


def _turned_groups(operand: Tensor, ends_G: Tensor) -> tuple[Scaled, Tensor]:
    """The columns of groups as rows, each group in whole units, and where each ends then."""
    codes, scale_inv = _scaled(operand, Usage.COLUMNWISE)
    turned, padded_G = kernels.transpose_groups(codes, ends_G)
    return Scaled(turned, _scales_of_lines(scale_inv, len(ends_G), len(turned))), padded_G


def _scales_of_lines(scale_inv: Tensor, groups: int, lines: int) -> Tensor:
    """``(G, lines)``, also where a group shares one scale."""
    if scale_inv.ndim == 1:
        scale_inv = scale_inv.unsqueeze(1).expand(groups, lines)
    return scale_inv.contiguous().view(groups, lines)
