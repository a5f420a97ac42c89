"""Grouped products of float8 rows: beside torch's own, and beside the same in bfloat16.

Three comparisons for each product.  *Codes* starts from what a layer holds, codes in the
matrix's own order, and so turns and pads what the product adds up over; torch's matmul beside
it starts from codes that are turned and padded already.  *Codes beside bfloat16* is what a
layer gains whose operands were quantized for other reasons, *quantized beside bfloat16* what it
gains with the cost of quantizing both operands.

Letters: T rows, K input features, N output features, G groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backstash import kernels
from backstash.formats import FLOAT8_ROWWISE, Usage
from backstash.kernels import Scaled
from backstash.nn import product
from backstash.nn.operands import Columns
from backstash.tensors import QuantizedTensor, equal_groups

#: Of torch's own float8 speed; and of bfloat16's, which float8 has to beat.
OF_TORCH, OF_BFLOAT16 = 0.97, 1.0


@dataclasses.dataclass(frozen=True)
class Work:
    """A product of ours and a yardstick, and how far apart their results may be."""

    what: str
    target: float
    tolerance: float
    ours: Callable[[], Tensor]
    theirs: Callable[[], Tensor]


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
    """Forward, the gradient of the rows and that of the weights, each in three comparisons."""
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
        lambda: F.grouped_mm(of.dy_TN, of.w_GNK, offs=ends_G),
        ends_G,
    )
    yield from _comparisons(
        "gradient of weights",
        dw,
        (lambda: of.rows(of.dy_TN, columns), lambda: of.rows(of.x_TK, columns)),
        lambda: F.grouped_mm(of.dy_TN.t(), of.x_TK, offs=ends_G),
        ends_G,
    )


def _comparisons(
    what: str,
    multiply: Callable[[Any, Any], Tensor],
    read: tuple[Callable[[], Tensor | Columns], Callable[[], Tensor | Columns]],
    in_bfloat16: Callable[[], Tensor],
    ends_G: Tensor,
) -> Iterator[Work]:
    made = [make() for make in read]
    one, other = (held.quantized() if isinstance(held, Columns) else held for held in made)
    del made
    apart = FLOAT8_ROWWISE.rtol
    theirs = _torchs_own(what, one, other, ends_G)
    yield Work(f"{what}, codes", OF_TORCH, 1e-2, lambda: multiply(one, other), theirs)
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


def _torchs_own(what: str, one: Tensor, other: Tensor, ends_G: Tensor) -> Callable[[], Tensor]:
    """Torch's matmul alone, on codes that lie as it wants them."""
    code = FLOAT8_ROWWISE.code.dtype
    buffers = [held.buffers for held in (one, other) if isinstance(held, QuantizedTensor)]
    if what == "gradient of weights":
        pair = [
            Scaled(kernels.transpose_groups(held["column_codes"].view(code), ends_G)[0], scales)
            for held in buffers
            for scales in [held["column_scale_inv"]]
        ]
        _, padded_G = kernels.transpose_groups(buffers[0]["column_codes"], ends_G)
        return lambda: kernels.float8_grouped_mm_dw(pair[0], pair[1], padded_G, torch.bfloat16)
    rows = Scaled(buffers[0]["row_codes"].view(code), buffers[0]["row_scale_inv"].flatten())
    G = len(other)
    if what == "forward":
        codes = buffers[1]["row_codes"].view(code).view(other.shape)
        weight = Scaled(codes, buffers[1]["row_scale_inv"].view(G, -1))
    else:
        codes = kernels.transpose_codes(buffers[1]["column_codes"].view(code).view(other.shape))
        weight = Scaled(codes, buffers[1]["column_scale_inv"])
    fast = what == "forward"
    return lambda: F.scaled_grouped_mm(  # pyright: ignore[reportAttributeAccessIssue]
        rows.codes,
        weight.codes.mT,
        rows.scale_inv,
        F.ScalingType.RowWise,
        weight.scale_inv,
        F.ScalingType.RowWise,
        offs=ends_G,
        use_fast_accum=fast,
    )
