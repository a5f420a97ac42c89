"""``Linear``: ``y = x w^T + b`` whose saved input is in the recipe's format.

After forward the layer holds the columns of ``x`` for the weight gradient, and a reference
to its weight.  A frozen weight keeps no input; an input that needs no gradient has none
computed.

Letters: T rows (all leading dimensions flattened), K input features, N output features.
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
    keep: Keep


class _Linear(torch.autograd.Function):
    @staticmethod
    @outside_autocast
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan) -> Tensor:
        projection = plan.projection
        needs = Needs(*ctx.needs_input_grad[:3])
        keeps_columns = needs.weight and plan.keep is Keep.COLUMNS
        x_rows, kept = projection.call.input_pair(as_rows(x), keep=keeps_columns)
        y_TN = projection.forward(x_rows, weight, bias)
        if needs.weight and plan.keep is Keep.ORIGINAL:
            kept = x
        if plan.keep is not Keep.NOTHING:
            save_for_backward(ctx, kept, weight if needs.matmul else None)
        ctx.plan = plan
        return in_shape_of(y_TN, x)

    @staticmethod
    @differentiable_once
    @outside_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight = saved_values(ctx)
        plan = ctx.plan
        call = plan.projection.call

        def read_x() -> Tensor | Columns:
            if plan.keep is Keep.ORIGINAL:
                return call.columns(Operand.INPUT, as_rows(kept))
            return call.kept_operand(kept)

        needs = Needs(*ctx.needs_input_grad[:3])
        grads = plan.projection.backward(as_rows(dy), weight, read_x, needs)
        dx = None if grads.x is None else grads.x.view(*dy.shape[:-1], grads.x.shape[1])
        return dx, grads.weight, grads.bias, None


class Linear(Layer):
    """``torch.nn.Linear`` with a recipe for its matmuls and for what it saves.

    Args:
        name: By which recipes and reports know this layer.
        save_original_input: Save the input itself and quantize its columns in backward;
            smaller where that tensor is alive anyway, as when a router reads it too.
        delay_wgrad_compute: Leave the weight gradient for :meth:`backward_dw`.
        fuse_wgrad_accumulation: Add the weight gradient to ``weight.main_grad``.

    Shapes: ``(*, in_features)`` to ``(*, out_features)``; the state dict is that of
    ``torch.nn.Linear``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        name: str | None = None,
        save_original_input: bool = False,
        delay_wgrad_compute: bool = False,
        fuse_wgrad_accumulation: bool = False,
    ) -> None:
        check_sizes(in_features=in_features, out_features=out_features)
        check_flags(bias=bias, save_original_input=save_original_input)
        delivery = Delivery.of(fused=fuse_wgrad_accumulation)
        super().__init__(name=name, delivery=delivery, delayed=delay_wgrad_compute)
        self.in_features = in_features
        self.out_features = out_features
        self.save_original_input = save_original_input
        new = placement(device, dtype)
        self.weight = self.make_parameter((out_features, in_features), **new)
        self.bias = self.make_parameter((out_features,), **new) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias as ``torch.nn.Linear`` does, in the same order."""
        draw_linear_(self.weight, self.bias)

    @uncompiled
    def forward(self, x: Tensor) -> Tensor:
        """Give ``x w^T + b`` of shape ``(*, out_features)``.

        Raises:
            ShapeError, DtypeError, DeviceError: ``x`` does not fit the weight.
            RecipeError: ``save_original_input`` under a recipe that learns its scales.
            ConfigError: ``fuse_wgrad_accumulation`` and the weight has no ``main_grad``.
        """
        dtype = self.compute_dtype(x, self.in_features, self.weight)
        projection = self.projection(self.weight, dtype)
        keep = self.keep(projection.call, original=self.save_original_input)
        return _Linear.apply(x.to(dtype), self.weight, self.bias, Plan(projection, keep))

    def extra_repr(self) -> str:
        """Say the sizes, as ``print(module)`` shows them."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}"
        )
