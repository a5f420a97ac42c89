"""An autograd function of your own that keeps its input in MXFP8.

``y = weight * silu(x)`` needs ``x`` and ``weight`` again in backward.  Here ``x`` is kept in
a quarter of its float32 bytes, and ``weight`` by reference: it comes back as the same
object, and no saved-tensor hook ever sees it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import backstash as bs


class _ScaledSiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        bs.save_for_backward(ctx, bs.MXFP8.quantize(x), weight)
        return weight * torch.nn.functional.silu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (dy,) = grads
        quantized, weight = bs.saved_values(ctx)
        x = quantized.dequantize()
        gate = torch.sigmoid(x)
        dx = dy * weight * gate * (1 + x * (1 - gate))
        dweight = (dy * x * gate).sum(0)
        return dx, dweight


def main() -> None:
    """Compare bytes and gradients with those of plain PyTorch."""
    torch.manual_seed(0)
    x = torch.randn(256, 128, requires_grad=True)
    weight = torch.nn.Parameter(torch.ones(128))

    def step(function: Any) -> tuple[int, Tensor]:
        meter = bs.Meter()
        with bs.saving(meter):
            y = function(x, weight)
        (dx,) = torch.autograd.grad(y.square().sum(), x)
        return meter.bytes, dx

    plain_bytes, exact = step(lambda x, weight: weight * torch.nn.functional.silu(x))
    kept_bytes, dx = step(_ScaledSiLU.apply)
    error = (dx - exact).norm() / exact.norm()
    print(f"kept for backward: {kept_bytes:,} bytes, plain PyTorch {plain_bytes:,}")
    print(f"relative error of the gradient: {error:.4f}")


if __name__ == "__main__":
    main()
