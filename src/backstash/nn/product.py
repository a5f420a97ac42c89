"""The three products of a layer on operands that may be codes, and what multiplies them.

An operand is a plain tensor, or a :class:`~backstash.tensors.QuantizedTensor` that can be read
along the one direction its product adds up over.  :func:`choose` looks at the two formats, the
sizes, the dtype, the device's compute capability, torch's version of CUDA and what the recipe
asks for, and at nothing else: it is a table, so a path is never tried to see whether it fails.
Where no matrix unit takes the codes, operands are decoded to memory and multiplied in the
layer's dtype: the same values, without the speed.  MXFP8 and NVFP4 are decoded inside the matmul
if the recipe asks for it, which writes no copy and takes longer.

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
from backstash.device import capability
from backstash.formats import (
    Code,
    Float8Block,
    Float8Rowwise,
    Format,
    MXFP8Format,
    NVFP4Format,
    Usage,
)
from backstash.kernels import FLOAT8_UNIT, Scaled
from backstash.nn import operands
from backstash.nn.gathered import Gathered, matrix
from backstash.nn.operands import Columns
from backstash.recipes import Operand, Phase, Recipe, Role
from backstash.recipes.products import Product
from backstash.saving.hooks import announce_product
from backstash.tensors import QuantizedTensor


class Path(enum.Enum):
    """What multiplies two operands."""

    #: A matmul of plain values; what is quantized is decoded first.
    VALUES = "emulated: decoded to values, then a matmul in the layer's dtype"
    #: Codes go to the unit as they are, and scales are multiplied onto the finished sum.
    FLOAT8 = "native: float8 matrix units, by torch's scaled_mm or our float8_grouped_mm"
    #: Our kernels for scales inside the sum.  Codes of blocks of 128 go to the unit; those of
    #: MXFP8 and NVFP4, if the recipe asks for it, are decoded as they are loaded.
    BLOCKS = "native: our quantized_mm, which reads codes and scales as they are kept"


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
        cuda: The version of CUDA that torch was built with, and so of its cuBLAS; None for none.
        decode_in_matmul: As in :class:`~backstash.recipes.Recipe`.
    """

    product: Product
    formats: tuple[Format | None, Format | None]
    sizes: tuple[int, int, int]
    groups: int | None
    dtype: torch.dtype
    capability: tuple[int, int] | None
    cuda: tuple[int, int] | None = None
    decode_in_matmul: bool = False


# The first capabilities with float8 units, and for which torch takes a scale for each row.
_UNITS, _ROW_SCALES = (8, 9), (9, 0)
# For rows torch calls cuBLAS on Hopper from this version on, elsewhere a kernel for one dtype.
_HOPPER, _CUBLAS_ROWS, _ROWS_DTYPE = 9, (12, 9), torch.bfloat16
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def choose(matmul: Matmul) -> Path:
    """What multiplies the operands."""
    if _float8_unit_fits(matmul):
        return Path.FLOAT8
    return Path.BLOCKS if _block_kernel_fits(matmul) else Path.VALUES


def _float8_unit_fits(matmul: Matmul) -> bool:
    _, K, N = matmul.sizes
    if matmul.capability is None or matmul.capability < _UNITS or matmul.dtype not in _DTYPES:
        return False
    if 0 in matmul.sizes or K % FLOAT8_UNIT or N % FLOAT8_UNIT:
        return False
    codes: set[Code] = set()
    has_rows = False
    for format in matmul.formats:
        if not isinstance(format, operands.SCALED_FORMATS):
            return False
        codes.add(format.code)
        has_rows = has_rows or isinstance(format, Float8Rowwise)
    if has_rows and matmul.groups is None:
        is_cublas = matmul.capability[0] == _HOPPER and (matmul.cuda or (0, 0)) >= _CUBLAS_ROWS
        takes = matmul.capability >= _ROW_SCALES and codes == {Code.E4M3}
        return takes and (is_cublas or matmul.dtype is _ROWS_DTYPE)
    # No recipe multiplies E5M2 by E5M2, and torch does not.
    return codes != {Code.E5M2}


def _block_kernel_fits(matmul: Matmul) -> bool:
    one, other = matmul.formats
    if matmul.capability is None or matmul.capability < _UNITS or matmul.dtype not in _DTYPES:
        return False
    if isinstance(one, Float8Block) and isinstance(other, Float8Block):
        # The kernels have lines on the left, along what the sum runs over.
        return not one.two_d
    if not matmul.decode_in_matmul:
        # Decoding to memory first is faster: the matmul then reads its operands by bulk copies.
        return False
    if isinstance(one, MXFP8Format) and isinstance(other, MXFP8Format):
        return not one.two_d
    if not (isinstance(one, NVFP4Format) and isinstance(other, NVFP4Format)) or one.two_d:
        return False
    if matmul.product is Product.WEIGHT_GRADIENT:
        # Rows that both sides mixed need not be unmixed; pairs of columns are not pairs of rows.
        return one.hadamard == other.hadamard and not other.two_d
    return not (matmul.product is Product.INPUT_GRADIENT and other.hadamard)


def paths(
    recipe: Recipe, capability: tuple[int, int] | None, *, is_grouped: bool
) -> dict[Product, Path]:
    """What multiplies each product of a bfloat16 layer under a recipe, where its sizes fit."""
    found = {}
    for product in Product:
        phase = Phase.FORWARD if product is Product.OUTPUT else Phase.BACKWARD
        one, other = (
            recipe.format(Role(Operand(operand), phase, "GroupedLinear")).along(usage)
            for operand, usage in product.value
        )
        found[product] = choose(
            Matmul(
                product=product,
                formats=(one, other),
                sizes=_ANY_SIZES,
                groups=_ANY_GROUPS if is_grouped else None,
                dtype=torch.bfloat16,
                capability=capability,
                decode_in_matmul=recipe.decode_in_matmul,
            )
        )
    return found


# Sizes and groups that every path takes.
_ANY_SIZES, _ANY_GROUPS = (4096, 4096, 4096), 8


def output(
    x: Tensor | Gathered,
    w: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    ends_G: Tensor | None,
    *,
    decode_in_matmul: bool = False,
) -> Tensor:
    """``x w^T + bias`` ``(T, N)``, from rows ``(T, K)`` and a weight ``(N, K)`` or ``(G, N, K)``.

    With groups each row meets its own group's weight and bias, and the tail is zeros.
    ``decode_in_matmul`` is that of the :class:`~backstash.recipes.Recipe`.
    """
    sizes = x.shape[0], x.shape[1], w.shape[-2]
    path = _path(Product.OUTPUT, (x, w), sizes, dtype, ends_G, decode_in_matmul=decode_in_matmul)
    if path is Path.FLOAT8 and ends_G is not None:
        weight = operands.grouped_weight(w, Usage.ROWWISE)
        y_TN = _rows_of_groups(x, weight, ends_G, dtype, fast_accumulation=True)
        return y_TN if bias is None else kernels.add_group_bias(y_TN, bias, ends_G)
    x = matrix(x)
    if path is Path.BLOCKS:
        both = operands.blocks(x, Usage.ROWWISE), operands.blocks(w, Usage.ROWWISE)
        y_TN = kernels.quantized_mm(*both, ends_G, dtype)
    elif ends_G is None:
        if path is Path.VALUES:
            return F.linear(values(x, dtype), values(w, dtype), bias)
        rows = operands.scaled(x, Usage.ROWWISE), operands.scaled(w, Usage.ROWWISE)
        return kernels.float8_mm(*rows, bias, dtype, fast_accumulation=True)
    else:
        x, w = values(x, dtype), values(w, dtype)
        with kernels.carrying(announce_product()):
            y_TN = kernels.grouped_mm(x, w, ends_G)
    if bias is None:
        return y_TN
    return y_TN + bias if ends_G is None else kernels.add_group_bias(y_TN, bias, ends_G)


def input_gradient(
    dy: Tensor | Gathered,
    w: Tensor | Columns,
    dtype: torch.dtype,
    ends_G: Tensor | None,
    *,
    decode_in_matmul: bool = False,
) -> Tensor:
    """``dy w`` as ``(T, K)``, from rows ``(T, N)`` and a weight ``(N, K)`` or ``(G, N, K)``."""
    sizes = dy.shape[0], w.shape[-1], w.shape[-2]
    path = _path(
        Product.INPUT_GRADIENT, (dy, w), sizes, dtype, ends_G, decode_in_matmul=decode_in_matmul
    )
    if path is Path.FLOAT8 and ends_G is not None:
        return _rows_of_groups(dy, operands.grouped_weight(w, Usage.COLUMNWISE), ends_G, dtype)
    dy = matrix(dy)
    if path is Path.VALUES:
        dy, w = values(dy, dtype), values(w, dtype)
        if ends_G is None:
            return dy @ w
        with kernels.carrying(announce_product()):
            return kernels.grouped_mm_dx(dy, w, ends_G)
    if path is Path.BLOCKS:
        both = operands.blocks(dy, Usage.ROWWISE), operands.blocks(w, Usage.COLUMNWISE)
        return kernels.quantized_mm_dx(*both, ends_G, dtype)
    rows, columns = operands.scaled(dy, Usage.ROWWISE), operands.turned(w)
    return kernels.float8_mm(rows, columns, None, dtype)


def _rows_of_groups(
    x: Tensor | Gathered,
    weight: Scaled,
    ends_G: Tensor,
    dtype: torch.dtype,
    *,
    fast_accumulation: bool = False,
) -> Tensor:
    """Codes of rows times their group's weight; those that are copies are read at their tokens."""
    options = {"fast_accumulation": fast_accumulation}
    if not isinstance(x, Gathered):
        rows = operands.grouped_rows(x, ends_G)
        return kernels.float8_grouped_mm(rows, weight, ends_G, dtype, **options)
    codes, scale_inv = operands.scaled(x.values_TH, Usage.ROWWISE)
    tokens = Scaled(codes, scale_inv.flatten())
    return kernels.float8_gathered_mm(tokens, weight, ends_G, x.source_R, dtype, **options)


def weight_gradient(
    dy: Tensor | Columns,
    x: Tensor | Columns,
    dtype: torch.dtype,
    ends_G: Tensor | None,
    *,
    decode_in_matmul: bool = False,
) -> Tensor:
    """``dy^T x`` as ``(N, K)``, or as ``(G, N, K)`` of each group's rows; zeros for no rows."""
    sizes = dy.shape[0], x.shape[1], dy.shape[1]
    path = _path(
        Product.WEIGHT_GRADIENT, (dy, x), sizes, dtype, ends_G, decode_in_matmul=decode_in_matmul
    )
    if path is Path.VALUES:
        dy, x = values(dy, dtype), values(x, dtype)
        if ends_G is None:
            return dy.t() @ x
        with kernels.carrying(announce_product()):
            return kernels.grouped_mm_dw(dy, x, ends_G)
    if path is Path.BLOCKS:
        both = operands.blocks(dy, Usage.COLUMNWISE), operands.blocks(x, Usage.COLUMNWISE)
        return kernels.quantized_mm_dw(*both, ends_G, dtype)
    if ends_G is None:
        return kernels.float8_mm(operands.turned(dy), operands.turned(x), None, dtype)
    dy_NP, padded_G = operands.turned_groups(dy, ends_G)
    x_KP, _ = operands.turned_groups(x, ends_G)
    return kernels.float8_grouped_mm_dw(dy_NP, x_KP, padded_G, dtype)


def reads_turned(
    formats: tuple[Float8Rowwise, Format],
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    ends_G: Tensor,
) -> bool:
    """Whether the weight gradient takes columns that are transposed as they are quantized.

    ``formats`` are those of the output gradient and of the input in backward.
    """
    one, other = (format.along(Usage.COLUMNWISE) for format in formats)
    matmul = Matmul(
        product=Product.WEIGHT_GRADIENT,
        formats=(one, other),
        sizes=sizes,
        groups=ends_G.shape[0],
        dtype=dtype,
        capability=_capability(ends_G.device),
    )
    return choose(matmul) is Path.FLOAT8


def values(operand: Tensor | Columns, dtype: torch.dtype) -> Tensor:
    """The values of an operand, decoded if need be."""
    if isinstance(operand, Columns):
        operand = operand.quantized()
    plain = operand.dequantize() if isinstance(operand, QuantizedTensor) else operand
    return plain if plain.dtype == dtype else plain.to(dtype)


def _path(
    product: Product,
    both: tuple[Tensor | Columns | Gathered, Tensor | Columns],
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    ends_G: Tensor | None,
    *,
    decode_in_matmul: bool,
) -> Path:
    held = [one.values_TH if isinstance(one, Gathered) else one for one in both]
    if not any(isinstance(operand, QuantizedTensor | Columns) for operand in held):
        return Path.VALUES  # nothing to choose, and the table takes longer to ask than to launch
    one, other = (
        _format_along(operand, usage)
        for operand, (_, usage) in zip(held, product.value, strict=True)
    )
    return choose(
        Matmul(
            product=product,
            formats=(one, other),
            sizes=sizes,
            groups=None if ends_G is None else ends_G.shape[0],
            dtype=dtype,
            capability=_capability(held[0].device),
            cuda=_CUDA,
            decode_in_matmul=decode_in_matmul,
        )
    )


def _capability(device: torch.device) -> tuple[int, int] | None:
    return capability(device) if device.type == "cuda" else None


def _cuda_version() -> tuple[int, int] | None:
    if torch.version.cuda is None:
        return None
    major, minor = torch.version.cuda.split(".")[:2]
    return int(major), int(minor)


_CUDA = _cuda_version()


def _format_along(operand: Tensor | Columns, usage: Usage) -> Format | None:
    """The format whose codes the product can read; None for values, also of the other direction."""
    if isinstance(operand, Columns):
        return operand.format
    if not isinstance(operand, QuantizedTensor):
        return None
    readable = usage in operand.usage or operand.format.serves_both
    return operand.format.along(usage) if readable else None
