"""Operands of the three products of a layer, quantized, and what their values multiply to."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from backstash.formats import Format, Usage
from backstash.nn import product
from backstash.tensors import GroupedTensor, QuantizedTensor, equal_groups

T, TAIL, K, N = 37, 3, 32, 48
#: A large group, an empty one, one of a single row; the rows do not fill the buffer.
COUNTS = [5, 0, 31, 1]


@dataclasses.dataclass(frozen=True)
class Operands:
    """The operands of all three products in the dtype of the layer, and quantized.

    ``quantized`` are rows of x and w, rows of dy and columns of w, columns of dy and x.
    """

    x: Tensor
    dy: Tensor
    bias: Tensor
    ends_G: Tensor | None
    quantized: tuple[QuantizedTensor, ...]

    def products(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output with bias, input gradient and weight gradient, as a layer asks for them."""
        x, w, dy, w_columns, dy_columns, x_columns = self.quantized
        dtype = self.x.dtype
        return (
            product.output(x, w, self.bias, dtype, self.ends_G, decode_in_matmul=True),
            product.input_gradient(dy, w_columns, dtype, self.ends_G, decode_in_matmul=True),
            product.weight_gradient(
                dy_columns, x_columns, dtype, self.ends_G, decode_in_matmul=True
            ),
        )


def operands(
    format: Format,
    dtype: torch.dtype,
    counts: list[int] | None,
    *,
    sizes: tuple[int, int, int] = (T + TAIL, K, N),
    gradient: Format | None = None,
    device: str = "cpu",
) -> Operands:
    """Random operands; in groups of ``counts`` rows with a tail of NaN."""
    rows, columns, features = sizes
    new = {"dtype": dtype, "device": device}
    x, dy = torch.randn(rows, columns, **new), torch.randn(rows, features, **new)
    if counts is None:
        ends_G, shape = None, (features, columns)
    else:
        ends_G = torch.tensor(counts, device=device).cumsum(0).int()
        shape = (len(counts), features, columns)
        x[sum(counts) :], dy[sum(counts) :] = float("nan"), float("nan")
    w = torch.randn(shape, **new)
    bias = torch.randn(shape[:-1], **new)
    weight_ends_G = None if counts is None else equal_groups(len(counts), features, w.device)

    def read(x: Tensor, usage: Usage, format: Format = format) -> QuantizedTensor:
        if ends_G is None:
            return format.quantize(x, usage)
        return format.quantize(GroupedTensor(x, ends_G), usage).data

    def read_weight(usage: Usage) -> QuantizedTensor:
        if weight_ends_G is None:
            return format.quantize(w, usage)
        flat = GroupedTensor(w.flatten(0, 1), weight_ends_G)
        return format.quantize(flat, usage).data.view(w.shape)

    gradient = gradient or format
    quantized = (
        read(x, Usage.ROWWISE),
        read_weight(Usage.ROWWISE),
        read(dy, Usage.ROWWISE, gradient),
        read_weight(Usage.COLUMNWISE),
        read(dy, Usage.COLUMNWISE, gradient),
        read(x, Usage.COLUMNWISE),
    )
    return Operands(x, dy, bias, ends_G, quantized)


def float64_products(ops: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """What the decoded values multiply to in float64; zeros in the tail."""
    values = [q.dequantize(dtype=torch.float64) for q in ops.quantized]
    return _multiplied(ops, values, ops.bias.double())


def magnitudes(ops: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """The same sums over magnitudes: what the error of adding and rounding is relative to."""
    values = [q.dequantize(dtype=torch.float64).abs() for q in ops.quantized]
    return _multiplied(ops, values, ops.bias.double().abs())


def rounding(dtype: torch.dtype, terms: int) -> float:
    """The error of products all together, as a share of the sums of their magnitudes.

    Half an eps for a result that is rounded once, and another where a bias is added to a rounded
    result.  A float8 unit aligns the 32 products of an instruction with its sum so far and cuts
    off what is below a 2^13th of the largest, so each instruction adds about that share.
    """
    return torch.finfo(dtype).eps + (terms // 32 + 1) * 2.0**-13


def most_rounding(dtype: torch.dtype, terms: int) -> float:
    """The most that a single product can be off: each of its terms may lose a largest's share.

    Where one term is nearly the whole sum, that is as many times the share of the sum as an
    instruction has terms.
    """
    return torch.finfo(dtype).eps + (terms // 32 + 1) * min(max(terms, 1), 32) * 2.0**-13


def _multiplied(ops: Operands, values: list[Tensor], bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, w, dy, w_columns, dy_columns, x_columns = values
    if ops.ends_G is None:
        return x @ w.t() + bias, dy @ w_columns, dy_columns.t() @ x_columns
    y, dx = (x.new_zeros(len(x), columns) for columns in (w.shape[1], w.shape[2]))
    dw, start = w.new_zeros(w.shape), 0
    for g, end in enumerate(ops.ends_G.tolist()):
        rows = slice(start, end)
        y[rows] = x[rows] @ w[g].t() + bias[g]
        dx[rows] = dy[rows] @ w_columns[g]
        dw[g] = dy_columns[rows].t() @ x_columns[rows]
        start = end
    return y, dx, dw


def assert_products(found: Tensor, wanted: Tensor, sizes: Tensor, terms: int) -> None:
    """Products of ``terms`` are right up to their rounding; ``sizes`` are sums of magnitudes."""
    assert found.shape == wanted.shape
    if not found.numel():
        return
    error, sizes = (found.double() - wanted.double()).abs(), sizes.double()
    # Below the smallest normal number a dtype has steps of one size.
    step = torch.finfo(found.dtype).tiny * torch.finfo(found.dtype).eps
    worst = float((error / (most_rounding(found.dtype, terms) * sizes + step)).max())
    assert worst <= 1, f"off by {worst:.2f} of what rounding explains"
    limit = rounding(found.dtype, terms) * sizes.norm() + step * found.numel() ** 0.5
    share = float(error.norm() / limit)
    assert share <= 1, f"all together off by {share:.2f} of what rounding explains"
