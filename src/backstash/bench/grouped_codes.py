"""Grouped products that read the codes of blocks, beside decoding first, and beside bfloat16.

*Codes beside decoded* is what reading codes saves over writing their values to memory and
multiplying those; the results are the same up to the rounding of the values.  *Codes beside
bfloat16* is what the product costs or gains beside one of plain values.

Letters: T rows, K input features, N output features, G groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from backstash.bench.grouped_float8 import OF_BFLOAT16, Work
from backstash.formats import FLOAT8_BLOCK, MXFP8, NVFP4, Format, Usage
from backstash.nn import product
from backstash.tensors import QuantizedTensor, equal_groups

# Of rows and of weights, as recipes have them.
_TILES = {"two_d": True}
FORMATS: dict[str, tuple[Format, Format]] = {
    "blocks of 128": (FLOAT8_BLOCK, dataclasses.replace(FLOAT8_BLOCK, **_TILES)),
    "mxfp8": (MXFP8, MXFP8),
    "mxfp8, weights in tiles": (MXFP8, dataclasses.replace(MXFP8, **_TILES)),
    "nvfp4": (
        dataclasses.replace(NVFP4, hadamard=True),
        dataclasses.replace(NVFP4, **_TILES),
    ),
}
Multiply = Callable[[Tensor, Tensor], Tensor]


def works(size: tuple[int, int, int, int], ends_G: Tensor) -> Iterator[Work]:
    """Forward, the gradient of the rows and that of the weights, of every format."""
    T, K, N, G = size
    new = {"device": ends_G.device, "dtype": torch.bfloat16}
    x_TK, dy_TN = torch.randn(T, K, **new), torch.randn(T, N, **new)
    w_GNK = torch.randn(G, N, K, **new)
    weight_ends_G = equal_groups(G, N, ends_G.device)
    rows, columns = Usage.ROWWISE, Usage.COLUMNWISE

    def forward(x: Tensor, w: Tensor) -> Tensor:
        return product.output(x, w, None, torch.bfloat16, ends_G, decode_in_matmul=True)

    def dx(dy: Tensor, w: Tensor) -> Tensor:
        return product.input_gradient(dy, w, torch.bfloat16, ends_G, decode_in_matmul=True)

    def dw(dy: Tensor, x: Tensor) -> Tensor:
        return product.weight_gradient(dy, x, torch.bfloat16, ends_G, decode_in_matmul=True)

    for name, (of_rows, of_weights) in FORMATS.items():

        def quantized(x: Tensor, usage: Usage, format: Format = of_rows) -> Tensor:
            return _quantize(x, format, usage, ends_G)

        def weight(usage: Usage, format: Format = of_weights) -> Tensor:
            return _quantize(w_GNK.flatten(0, 1), format, usage, weight_ends_G).view(w_GNK.shape)

        for what, multiply, codes, plain in (
            ("forward", forward, (quantized(x_TK, rows), weight(rows)), (x_TK, w_GNK)),
            ("gradient of rows", dx, (quantized(dy_TN, rows), weight(columns)), (dy_TN, w_GNK)),
            (
                "gradient of weights",
                dw,
                (quantized(dy_TN, columns), quantized(x_TK, columns)),
                (dy_TN, x_TK),
            ),
        ):
            yield from _comparisons(f"{name} {what}", of_rows, multiply, codes, plain)


def _comparisons(
    what: str,
    format: Format,
    multiply: Multiply,
    codes: tuple[Tensor, Tensor],
    plain: tuple[Tensor, Tensor],
) -> Iterator[Work]:
    def read() -> Tensor:
        return multiply(*codes)

    def decoded() -> Tensor:
        return multiply(*(operand.dequantize() for operand in codes))

    yield Work(f"{what}, codes beside decoded", 1.0, 1e-2, read, decoded)
    # Values of a format differ from those in bfloat16 by its own rounding.
    apart = max(format.rtol, 0.125)
    yield Work(f"{what}, codes beside bfloat16", OF_BFLOAT16, apart, read, lambda: multiply(*plain))


def _quantize(x: Tensor, format: Format, usage: Usage, ends_G: Tensor) -> Tensor:
    if format.serves_both:
        usage = Usage.BOTH
    return QuantizedTensor.quantize(x, format=format, usage=usage, ends_G=ends_G, scale=None)
