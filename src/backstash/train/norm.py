"""``RMSNorm`` as a module: it keeps its input and one number a row, nothing in between."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from backstash import kernels
from backstash.saving import differentiable_once, save_for_backward, saved_values


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(self, features: int, eps: float = 1e-5, *, dtype: torch.dtype | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x`` of shape ``(..., features)``."""
        return _RMSNorm.apply(x, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y_TH, rstd_T = kernels.rms_norm(x.flatten(0, -2), weight, eps)
        save_for_backward(ctx, x, weight, rstd_T)
        return y_TH.view(x.shape)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd_T = saved_values(ctx)
        dx_TH, dweight_H = kernels.rms_norm_backward(
            grads[0].flatten(0, -2), x.flatten(0, -2), weight, rstd_T
        )
        return dx_TH.view(x.shape), dweight_H, None
