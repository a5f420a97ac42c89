"""Grouped products of float8 rows: beside torch's own, and beside the same in bfloat16.

*Codes* starts where torch's matmul starts: from codes that lie as a float8 unit reads them, with
what is added up side by side.  So a layer's casts write them, straight from values.  *Codes in
order* starts from codes in the matrix's own order, as they are saved and kept: of a gradient ours
turns and pads them first, and torch's beside it starts from turned ones still.  *Codes beside
bfloat16* is what a layer gains whose operands were quantized for other reasons, *quantized beside
bfloat16* what it gains with the cost of quantizing both operands.  *Both gradients* quantizes as a
layer's backward does, the output gradient once for its two products.

Letters: T rows, K input features, N output features, G groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backstash.formats import FLOAT8_ROWWISE, Usage
from backstash.kernels import Scaled
from backstash.nn import operands, product
from backstash.nn.operands import Columns
from backstash.tensors import QuantizedTensor, equal_groups

#: Of bfloat16's speed, which float8 has to beat.
OF_BFLOAT16 = 1.0
Result = Tensor | tuple[Tensor, ...]
Read = Callable[[], Tensor | Columns]


@dataclasses.dataclass(frozen=True)
class Work:
    """A product of ours and a yardstick.

    Attributes:
        what: Its name.
        target: The share of the yardstick's speed that is wanted; None for that of plain values.
        tolerance: How far apart the results may be.
        ours: Ours.
        theirs: The yardstick.
        products: How many matmuls it is.
    """

    what: str
    target: float | None
    tolerance: float
    ours: Callable[[], Result]
    theirs: Callable[[], Result]
    products: int = 1


@dataclasses.dataclass(frozen=True)
class Operands:
    """The values of all operands, with the ends of the groups."""

    x_TK: Tensor
    dy_TN: Tensor
    w_GNK: Tensor
    ends_G: Tensor

    def rows(self, x: Tensor, usage: Usage) -> Tensor | Columns:
        return _read(x, usage, self.ends_G)

    def weight(self, usage: Usage) -> Tensor | Columns:
        G, N, _ = self.w_GNK.shape
        ends_G = equal_groups(G, N, self.ends_G.device)
        return _read(self.w_GNK.flatten(0, 1), usage, ends_G).view(self.w_GNK.shape)


def _read(x: Tensor, usage: Usage, ends_G: Tensor) -> Tensor | Columns:
    """An operand as a layer makes it: columns are quantized by the product."""
    if usage is Usage.COLUMNWISE:
        return Columns(x, FLOAT8_ROWWISE, ends_G, x.shape)
    return QuantizedTensor.quantize(
        x, format=FLOAT8_ROWWISE, usage=usage, ends_G=ends_G, scale=None
    )


def works(size: tuple[int, int, int, int], ends_G: Tensor) -> Iterator[Work]:
    """Forward, the gradient of the rows and that of the weights, and both as a layer has them."""
    T, K, N, G = size
    new = {"device": ends_G.device, "dtype": torch.bfloat16}
    of = Operands(
        torch.randn(T, K, **new), torch.randn(T, N, **new), torch.randn(G, N, K, **new), ends_G
    )
    dtype = torch.bfloat16

    def forward(x: Tensor, w: Tensor) -> Tensor:
        return product.output(x, w, None, dtype, ends_G)

    def dx(dy: Tensor, w: Tensor | Columns) -> Tensor:
        return product.input_gradient(dy, w, dtype, ends_G)

    def dw(dy: Tensor | Columns, x: Tensor | Columns) -> Tensor:
        return product.weight_gradient(dy, x, dtype, ends_G)

    def dx_of_values() -> Tensor:
        return F.grouped_mm(of.dy_TN, of.w_GNK, offs=ends_G)

    def dw_of_values() -> Tensor:
        return F.grouped_mm(of.dy_TN.t(), of.x_TK, offs=ends_G)

    def both() -> tuple[Tensor, Tensor]:
        rows, columns = operands.rows_and_columns(FLOAT8_ROWWISE, of.dy_TN, ends_G)
        x = of.rows(of.x_TK, Usage.COLUMNWISE)
        return dx(rows, of.weight(Usage.COLUMNWISE)), dw(columns, x)

    rows, columns = Usage.ROWWISE, Usage.COLUMNWISE
    yield from _comparisons(
        "forward",
        forward,
        (lambda: of.rows(of.x_TK, rows), lambda: of.weight(rows)),
        lambda: F.grouped_mm(of.x_TK, of.w_GNK.mT, offs=ends_G),
        ends_G,
    )
    yield from _comparisons(
        "gradient of rows",
        dx,
        (lambda: of.rows(of.dy_TN, rows), lambda: of.weight(columns)),
        dx_of_values,
        ends_G,
    )
    yield from _comparisons(
        "gradient of weights",
        dw,
        (lambda: of.rows(of.dy_TN, columns), lambda: of.rows(of.x_TK, columns)),
        dw_of_values,
        ends_G,
    )
    yield Work(
        "both gradients, quantized beside bfloat16",
        OF_BFLOAT16,
        FLOAT8_ROWWISE.rtol,
        both,
        lambda: (dx_of_values(), dw_of_values()),
        products=2,
    )


def _comparisons(
    what: str,
    multiply: Callable[[Any, Any], Tensor],
    read: tuple[Read, Read],
    in_bfloat16: Callable[[], Tensor],
    ends_G: Tensor,
) -> Iterator[Work]:
    made = [make() for make in read]
    one, other = (_turned(held) for held in made)
    apart = FLOAT8_ROWWISE.rtol
    theirs = _torchs_own(what, one, other, ends_G)
    yield Work(f"{what}, codes", None, 1e-2, lambda: multiply(one, other), theirs)
    if any(isinstance(held, Columns) for held in made):
        kept, other_kept = (
            held.quantized() if isinstance(held, Columns) else held for held in made
        )
        yield Work(
            f"{what}, codes in order", None, 1e-2, lambda: multiply(kept, other_kept), theirs
        )
    yield Work(
        f"{what}, codes beside bfloat16",
        OF_BFLOAT16,
        apart,
        lambda: multiply(one, other),
        in_bfloat16,
    )
    yield Work(
        f"{what}, quantized beside bfloat16",
        OF_BFLOAT16,
        apart,
        lambda: multiply(read[0](), read[1]()),
        in_bfloat16,
    )


def _turned(held: Tensor | Columns) -> Tensor | Columns:
    """Columns as the cast of a layer leaves them."""
    if isinstance(held, Columns):
        return dataclasses.replace(held, ready=held.turned())
    return held


def _torchs_own(
    what: str, one: Tensor | Columns, other: Tensor | Columns, ends_G: Tensor
) -> Callable[[], Tensor]:
    """Torch's matmul alone, on codes that lie as it wants them."""
    if what == "gradient of weights":
        dy, ends_G = operands.turned_groups(one, ends_G)
        x, _ = operands.turned_groups(other, ends_G)
        a, b = (Scaled(each.codes, each.scale_inv.flatten()) for each in (dy, x))
    else:
        usage = Usage.ROWWISE if what == "forward" else Usage.COLUMNWISE
        rows = operands.scaled(one, Usage.ROWWISE)
        a = Scaled(rows.codes, rows.scale_inv.flatten())
        weight = operands.grouped_weight(other, usage)
        b = Scaled(weight.codes.contiguous(), weight.scale_inv)
    fast = what == "forward"
    return lambda: F.scaled_grouped_mm(  # pyright: ignore[reportAttributeAccessIssue]
        a.codes,
        b.codes.mT,
        a.scale_inv,
        F.ScalingType.RowWise,
        b.scale_inv,
        F.ScalingType.RowWise,
        offs=ends_G,
        output_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
