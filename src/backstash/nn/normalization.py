"""The normalization in front of a matmul, as a value that a plan can carry.

Forward gives the normalized rows and their statistics.  The rows are not kept: they come
out of the same arithmetic on the same input again, bit for bit, when backward wants them.

Letters: T rows, H features.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import torch
from torch import Tensor, nn

from backstash import kernels
from backstash.errors import ConfigError
from backstash.nn.options import check_numbers


class Kind(enum.Enum):
    """Which statistics a row is normalized by."""

    LAYER_NORM = "LayerNorm"
    RMS_NORM = "RMSNorm"

    @classmethod
    def named(cls, name: str) -> Kind:
        """The kind of that name.

        Raises:
            ConfigError: there is none.
        """
        for kind in cls:
            if kind.value == name:
                return kind
        raise ConfigError(
            f"normalization must be one of {', '.join(kind.value for kind in cls)}, got "
            f"{name!r}; pick one of these"
        )


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Float32 ``(T,)`` each; a row normalized by its mean square has no mean."""

    mean: Tensor | None
    rstd: Tensor


@dataclasses.dataclass(frozen=True)
class Normalization:
    """LayerNorm or RMSNorm with a given epsilon."""

    kind: Kind
    eps: float

    def __post_init__(self) -> None:
        check_numbers(eps=self.eps, remedy="1e-5 is usual")

    def new_parameters(self, features: int, **new: Any) -> tuple[nn.Parameter, nn.Parameter | None]:
        """Weight and bias ``(H,)``, uninitialized; RMSNorm has no bias."""
        weight = nn.Parameter(torch.empty(features, **new))
        if self.kind is Kind.RMS_NORM:
            return weight, None
        return weight, nn.Parameter(torch.empty(features, **new))

    def forward(
        self, x_TH: Tensor, weight_H: Tensor, bias_H: Tensor | None
    ) -> tuple[Tensor, Statistics]:
        if self.kind is Kind.RMS_NORM:
            y_TH, rstd_T = kernels.rms_norm(x_TH, weight_H, self.eps)
            return y_TH, Statistics(None, rstd_T)
        y_TH, mean_T, rstd_T = kernels.layer_norm(x_TH, weight_H, bias_H, self.eps)
        return y_TH, Statistics(mean_T, rstd_T)

    def backward(
        self, dy_TH: Tensor, x_TH: Tensor, weight_H: Tensor, statistics: Statistics
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Give the gradients of rows, weight and bias."""
        if statistics.mean is None:
            dx_TH, dweight_H = kernels.rms_norm_backward(dy_TH, x_TH, weight_H, statistics.rstd)
            return dx_TH, dweight_H, None
        return kernels.layer_norm_backward(dy_TH, x_TH, weight_H, statistics.mean, statistics.rstd)


def make_neutral_(weight: Tensor, bias: Tensor | None) -> None:
    """Let a normalization change nothing but the statistics of its rows."""
    nn.init.ones_(weight)
    if bias is not None:
        nn.init.zeros_(bias)
