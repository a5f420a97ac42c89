"""The products of quantized operands, and which path multiplies them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import backstash as bs
from backstash import kernels
from backstash.nn import product
from format_cases import by_format

T, K, N = 37, 32, 48
COUNTS = [5, 0, 27, 1]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def quantized(x: Tensor, format: bs.Format, usage: bs.Usage, ends_G: Tensor | None) -> Tensor:
    if ends_G is None:
        return format.quantize(x, usage)
    return format.quantize(bs.GroupedTensor(x, ends_G), usage).data


@by_format
@dtypes
@pytest.mark.parametrize("grouped", [False, True], ids=["dense", "grouped"])
def test_on_a_cpu_the_products_are_those_of_the_decoded_values(
    format: bs.Format, dtype: torch.dtype, grouped: bool
) -> None:
    x, dy = torch.randn(T, K, dtype=dtype), torch.randn(T, N, dtype=dtype)
    ends_G = torch.tensor(COUNTS).cumsum(0).int() if grouped else None
    G = len(COUNTS) if grouped else 1
    w = torch.randn(G, N, K, dtype=dtype) if grouped else torch.randn(N, K, dtype=dtype)
    rows, columns = bs.Usage
    each = torch.arange(1, G + 1).int() * N if grouped else None
    w_rows, w_columns = (
        quantized(w.reshape(-1, K), format, usage, each).view(w.shape) for usage in bs.Usage
    )
    x_rows, x_columns = (quantized(x, format, usage, ends_G) for usage in (rows, columns))
    dy_rows, dy_columns = (quantized(dy, format, usage, ends_G) for usage in (rows, columns))
    y = product.output(x_rows, w_rows, None, dtype, ends_G)
    dx = product.input_gradient(dy_rows, w_columns, dtype, ends_G)
    dw = product.weight_gradient(dy_columns, x_columns, dtype, ends_G)
    values = [q.dequantize() for q in (x_rows, w_rows, dy_rows, w_columns, dy_columns, x_columns)]
    if ends_G is None:
        wanted = F.linear(*values[:2]), values[2] @ values[3], values[4].t() @ values[5]
    else:
        wanted = (
            kernels.grouped_mm(values[0], values[1], ends_G),
            kernels.grouped_mm_dx(values[2], values[3], ends_G),
            kernels.grouped_mm_dw(values[4], values[5], ends_G),
        )
    assert all(map(torch.equal, (y, dx, dw), wanted))
