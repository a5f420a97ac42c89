"""``LayerNormLinear``: a normalization and the matmul after it, saving one input for both.

Two modules in a row would keep the normalization's input and the matmul's.  Here only the
first is kept, with two numbers a row; backward normalizes again, which is exact, and only
then quantizes the columns.

Letters: T rows (all leading dimensions flattened), H input features, N output features.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from backstash.nn.layer import (
    Keep,
    Layer,
    as_rows,
    in_shape_of,
    outside_autocast,
    uncompiled,
)
from backstash.nn.module import draw_linear_
from backstash.nn.normalization import Kind, Normalization, Statistics, make_neutral_
from backstash.nn.operands import Columns
from backstash.nn.options import check_flags, check_sizes, placement
from backstash.nn.projection import Needs, Projection
from backstash.nn.weight_grad import Delivery
from backstash.recipes import Operand
from backstash.saving import differentiable_once, save_for_backward, saved_values


@dataclasses.dataclass(frozen=True)
class Plan:
    """What backward must know that is no tensor."""

    projection: Projection
    normalization: Normalization
    keep: Keep
    returns_normalized: bool

    def needs(self, needed: tuple[bool, ...]) -> Needs:
        """What the matmul must give for (x, norm weight, norm bias, weight, bias)."""
        return Needs(any(needed[:3]), needed[3], needed[4])


class _LayerNormLinear(torch.autograd.Function):
    @staticmethod
    @outside_autocast
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        plan: Plan,
    ) -> tuple[Tensor, ...]:
        projection = plan.projection
        needs = plan.needs(ctx.needs_input_grad)
        normalized_TH, statistics = plan.normalization.forward(as_rows(x), norm_weight, norm_bias)
        x_rows = projection.call.rows(Operand.INPUT, normalized_TH.to(projection.dtype))
        y_TN = projection.forward(x_rows, weight, bias)
        if plan.keep is not Keep.NOTHING:
            values = (x, statistics.mean, statistics.rstd, norm_weight, norm_bias, weight)
            save_for_backward(ctx, *(values if needs.matmul else (None,) * len(values)))
        ctx.plan = plan
        y = in_shape_of(y_TN, x)
        return (y, in_shape_of(normalized_TH, x)) if plan.returns_normalized else (y,)

    @staticmethod
    @differentiable_once
    @outside_autocast
    def backward(ctx: Any, dy: Tensor, *dnormalized: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, norm_weight, norm_bias, weight = saved_values(ctx)
        plan = ctx.plan
        call, dtype = plan.projection.call, plan.projection.dtype

        def read_x() -> Tensor | Columns:
            again_TH, _ = plan.normalization.forward(as_rows(x), norm_weight, norm_bias)
            return call.columns(Operand.INPUT, again_TH.to(dtype))

        needs = plan.needs(ctx.needs_input_grad)
        grads = plan.projection.backward(as_rows(dy), weight, read_x, needs)
        if grads.x is None:
            return None, None, None, grads.weight, grads.bias, None
        dnormalized_TH = grads.x.to(x.dtype)
        for more in dnormalized:
            dnormalized_TH = dnormalized_TH + as_rows(more)
        dx, dnorm_weight, dnorm_bias = plan.normalization.backward(
            dnormalized_TH, as_rows(x), norm_weight, Statistics(mean, rstd)
        )
        return dx.view(x.shape), dnorm_weight, dnorm_bias, grads.weight, grads.bias, None


class LayerNormLinear(Layer):
    """A LayerNorm or RMSNorm and a ``Linear`` after it, with one saved input.

    Args:
        eps: Added to the variance.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``; the latter has no bias.
        return_layernorm_output: Return the normalized input as well, for a residual branch.
        name: By which recipes and reports know this layer.
        delay_wgrad_compute: Leave the weight gradient for :meth:`backward_dw`.
        fuse_wgrad_accumulation: Add the weight gradient to ``weight.main_grad``.

    Shapes: ``(*, in_features)`` to ``(*, out_features)``, or to a pair of it and
    ``(*, in_features)``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        name: str | None = None,
        delay_wgrad_compute: bool = False,
        fuse_wgrad_accumulation: bool = False,
    ) -> None:
        check_sizes(in_features=in_features, out_features=out_features)
        check_flags(bias=bias, return_layernorm_output=return_layernorm_output)
        delivery = Delivery.of(fused=fuse_wgrad_accumulation)
        super().__init__(name=name, delivery=delivery, delayed=delay_wgrad_compute)
        self.in_features = in_features
        self.out_features = out_features
        self.normalization = Normalization(Kind.named(normalization), eps)
        self.return_layernorm_output = return_layernorm_output
        new = placement(device, dtype)
        norm = self.normalization.new_parameters(in_features, **new)
        self.layer_norm_weight, self.layer_norm_bias = norm
        self.weight = self.make_parameter((out_features, in_features), **new)
        self.bias = self.make_parameter((out_features,), **new) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make the normalization neutral and draw weight and bias as ``Linear`` does."""
        make_neutral_(self.layer_norm_weight, self.layer_norm_bias)
        draw_linear_(self.weight, self.bias)

    @uncompiled
    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize ``x`` and multiply.

        Raises:
            ShapeError, DtypeError, DeviceError: ``x`` does not fit the weight.
            ConfigError: ``fuse_wgrad_accumulation`` and the weight has no ``main_grad``.
        """
        dtype = self.compute_dtype(x, self.in_features, self.weight)
        projection = self.projection(self.weight, dtype)
        plan = Plan(
            projection,
            self.normalization,
            self.keep(projection.call),
            self.return_layernorm_output,
        )
        y, *normalized = _LayerNormLinear.apply(
            x, self.layer_norm_weight, self.layer_norm_bias, self.weight, self.bias, plan
        )
        return (y, *normalized) if normalized else y

    def extra_repr(self) -> str:
        """Say the sizes, as ``print(module)`` shows them."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, normalization={self.normalization.kind.value}, "
            f"eps={self.normalization.eps}"
        )
