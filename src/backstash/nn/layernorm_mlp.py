"""``LayerNormMLP``: a normalization, two matmuls and the activation between them.

Three values are kept: the input ``x`` with two numbers a row, and the pre-activation ``h``.
The normalized input and the activation are computed again in backward from those.

Letters: T rows, H model features, F columns of ``h``, I columns of the activation.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from backstash.nn.feed_forward import (
    FeedForward,
    Noted,
    Once,
    Rows,
    Wanted,
    Weights,
    checked_activation,
    preactivation_columns,
)
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
from backstash.nn.weight_grad import Delivery
from backstash.recipes import Operand
from backstash.saving import differentiable_once, is_hooked, save_for_backward, taken_values


@dataclasses.dataclass(frozen=True)
class Plan:
    """What backward must know that is no tensor."""

    feed_forward: FeedForward
    normalization: Normalization
    keep: Keep
    is_hooked: bool

    def wanted(self, needed: tuple[bool, ...]) -> Wanted:
        """What the matmuls must give for (x, norm weight, norm bias, weights...)."""
        if self.keep is Keep.NOTHING:
            return Wanted.nothing()
        return Wanted(any(needed[:3]), False, Weights(*needed[3:7]))


class _LayerNormMLP(torch.autograd.Function):
    @staticmethod
    @outside_autocast
    def forward(ctx: Any, x: Tensor, *parameters_and_plan: Any) -> Tensor:
        norm_weight, norm_bias, *weights, plan = parameters_and_plan
        wanted = plan.wanted(ctx.needs_input_grad)
        fc1 = plan.feed_forward.fc1
        normalized_TH, statistics = plan.normalization.forward(as_rows(x), norm_weight, norm_bias)
        x_rows = Once(fc1.call.rows(Operand.INPUT, normalized_TH.to(fc1.dtype)))
        del normalized_TH
        weights = Weights(*weights)
        y_TH, h, _ = plan.feed_forward.forward(x_rows, weights, Rows(None, None), wanted)
        if plan.keep is not Keep.NOTHING:
            norm = (x, statistics.mean, statistics.rstd, norm_weight, norm_bias)
            norm = norm if wanted.x or wanted.weights.fc1_weight else (None,) * len(norm)
            save_for_backward(ctx, h, weights.fc1_weight, weights.fc2_weight, *norm)
        ctx.plan = plan
        return in_shape_of(y_TH, x)

    @staticmethod
    @differentiable_once
    @outside_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        plan = ctx.plan
        values, is_last = taken_values(ctx)
        h, fc1_weight, fc2_weight, *norm = values
        del values
        h = Once(h, is_alone=is_last and not plan.is_hooked)
        x, mean, rstd, norm_weight, norm_bias = norm
        fc1 = plan.feed_forward.fc1

        def read_x() -> Tensor | Columns:
            again_TH, _ = plan.normalization.forward(as_rows(x), norm_weight, norm_bias)
            return fc1.call.columns(Operand.INPUT, again_TH.to(fc1.dtype))

        dnormalized_TH, _, dweights = plan.feed_forward.backward(
            as_rows(dy),
            h,
            read_x,
            (Weights(fc1_weight, None, fc2_weight, None), Rows(None, None), Noted()),
            plan.wanted(ctx.needs_input_grad),
        )
        if dnormalized_TH is None:
            return None, None, None, *dweights, None
        dx, dnorm_weight, dnorm_bias = plan.normalization.backward(
            dnormalized_TH.to(x.dtype), as_rows(x), norm_weight, Statistics(mean, rstd)
        )
        return dx.view(x.shape), dnorm_weight, dnorm_bias, *dweights, None


class LayerNormMLP(Layer):
    """The feed-forward block of a transformer, with one saved input and one pre-activation.

    Args:
        hidden_size: Features of input and output.
        ffn_hidden_size: Columns of the activation; a gated one has twice as many before it.
        eps: Added to the variance.
        activation: ``gelu``, ``relu``, ``silu``, or gated ``swiglu``, ``geglu``, ``reglu``.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``; the latter has no bias.
        name: By which recipes and reports know this layer.
        delay_wgrad_compute: Leave the weight gradients for :meth:`backward_dw`.
        fuse_wgrad_accumulation: Add the weight gradients to each weight's ``main_grad``.

    Shapes: ``(*, hidden_size)`` to ``(*, hidden_size)``.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str = "gelu",
        normalization: str = "LayerNorm",
        name: str | None = None,
        delay_wgrad_compute: bool = False,
        fuse_wgrad_accumulation: bool = False,
    ) -> None:
        check_sizes(hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)
        check_flags(bias=bias)
        delivery = Delivery.of(fused=fuse_wgrad_accumulation)
        super().__init__(name=name, delivery=delivery, delayed=delay_wgrad_compute)
        self.hidden_size = hidden_size
        self.ffn_hidden_size = ffn_hidden_size
        self.activation = checked_activation(activation)
        self.normalization = Normalization(Kind.named(normalization), eps)
        new = placement(device, dtype)
        norm = self.normalization.new_parameters(hidden_size, **new)
        self.layer_norm_weight, self.layer_norm_bias = norm
        columns = preactivation_columns(activation, ffn_hidden_size)
        self.fc1_weight = self.make_parameter((columns, hidden_size), linear="fc1", **new)
        self.fc1_bias = self.make_parameter((columns,), **new) if bias else None
        self.fc2_weight = self.make_parameter((hidden_size, ffn_hidden_size), linear="fc2", **new)
        self.fc2_bias = self.make_parameter((hidden_size,), **new) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make the normalization neutral and draw the rest as two ``Linear`` do."""
        make_neutral_(self.layer_norm_weight, self.layer_norm_bias)
        draw_linear_(self.fc1_weight, self.fc1_bias)
        draw_linear_(self.fc2_weight, self.fc2_bias)

    @uncompiled
    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x``, widen it, activate, narrow it again.

        Raises:
            ShapeError, DtypeError, DeviceError: ``x`` does not fit the weights.
            ConfigError: ``fuse_wgrad_accumulation`` and a weight has no ``main_grad``.
        """
        dtype = self.compute_dtype(x, self.hidden_size, self.fc1_weight)
        feed_forward = FeedForward(
            self.projection(self.fc1_weight, dtype, "fc1"),
            self.projection(self.fc2_weight, dtype, "fc2"),
            self.activation,
        )
        keep = self.keep(feed_forward.fc1.call)
        plan = Plan(feed_forward, self.normalization, keep, is_hooked())
        return _LayerNormMLP.apply(
            x,
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.fc1_weight,
            self.fc1_bias,
            self.fc2_weight,
            self.fc2_bias,
            plan,
        )

    def extra_repr(self) -> str:
        """Say the sizes, as ``print(module)`` shows them."""
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, "
            f"bias={self.fc1_bias is not None}, activation={self.activation!r}, "
            f"normalization={self.normalization.kind.value}, eps={self.normalization.eps}"
        )
