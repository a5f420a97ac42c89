"""``GroupedLinear``: G linear layers in one, each for its own group of the rows.

The rows of all groups lie one after another; how many each group has is read on the device
only, so the shapes of a step depend on nothing that the router decides, and a buffer may
have more room than rows.  Rows past the last group come out as zeros, get zero gradient,
and are never read: NaN in them changes nothing.

Letters: T rows of the buffer, K input features, N output features, G groups.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from backstash import kernels
from backstash.errors import ConfigError, DeviceError, DtypeError, ShapeError
from backstash.nn.experts import join_experts, split_experts
from backstash.nn.group_ends import Counts, group_ends
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
from backstash.nn.projection import Groups, Needs, Projection
from backstash.nn.weight_grad import Delivery
from backstash.recipes import Operand
from backstash.saving import differentiable_once, save_for_backward, saved_values
from backstash.tensors import GroupedTensor


@dataclasses.dataclass(frozen=True)
class Plan:
    """What backward must know that is no tensor."""

    projection: Projection
    keep: Keep


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    @outside_autocast
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ends_G: Tensor,
        out: Tensor | None,
        plan: Plan,
    ) -> Tensor:
        projection = plan.projection
        needs = Needs(*ctx.needs_input_grad[:3])
        keeps_columns = needs.weight and plan.keep is Keep.COLUMNS
        # Only whole rows one after another have a valid prefix that can be kept alone.
        x_TK = as_rows(x).contiguous()
        x_rows, kept = projection.call.input_pair(x_TK, ends_G, keep=keeps_columns)
        y_TN = projection.forward(x_rows, weight, bias, ends_G)
        if needs.weight and plan.keep is Keep.ORIGINAL:
            kept = GroupedTensor.from_parts(x, ends_G) if x_TK is x else x
        if plan.keep is not Keep.NOTHING:
            save_for_backward(ctx, kept, weight if needs.matmul else None, ends_G)
        ctx.plan = plan
        y = in_shape_of(y_TN, x)
        if out is None:
            return y
        out.copy_(y)
        ctx.mark_dirty(out)
        return out

    @staticmethod
    @differentiable_once
    @outside_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight, ends_G = saved_values(ctx)
        plan = ctx.plan
        call = plan.projection.call

        def read_x() -> Tensor | Columns:
            if plan.keep is not Keep.ORIGINAL:
                return call.kept_operand(kept)
            x = kept.data if isinstance(kept, GroupedTensor) else kept
            return call.columns(Operand.INPUT, as_rows(x), ends_G)

        needs = Needs(*ctx.needs_input_grad[:3])
        with kernels.sharing_tables(ends_G, row_products=1, column_products=1):
            grads = plan.projection.backward(as_rows(dy), weight, read_x, needs, Groups(ends_G))
        dx = None if grads.x is None else grads.x.view(*dy.shape[:-1], grads.x.shape[1])
        return dx, grads.weight, grads.bias, None, None, None


class GroupedLinear(Layer):
    """G linear layers, the g-th of which multiplies the g-th group of rows.

    Args:
        num_gemms: G, the number of groups.
        name: By which recipes and reports know this layer.
        save_original_input: Save the input itself and quantize its columns in backward.
        delay_wgrad_compute: Leave the weight gradient for :meth:`backward_dw`.
        fuse_wgrad_accumulation: Add the weight gradient to ``weight.main_grad``.

    The weight is one parameter ``(G, out_features, in_features)``, the bias one of
    ``(G, out_features)``; a state dict with ``weight0``, ``weight1``, … loads as well.
    """

    def __init__(
        self,
        num_gemms: int,
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
        check_sizes(num_gemms=num_gemms, least=1)
        check_sizes(in_features=in_features, out_features=out_features)
        check_flags(bias=bias, save_original_input=save_original_input)
        delivery = Delivery.of(fused=fuse_wgrad_accumulation)
        super().__init__(name=name, delivery=delivery, delayed=delay_wgrad_compute)
        self.num_gemms = num_gemms
        self.in_features = in_features
        self.out_features = out_features
        self.save_original_input = save_original_input
        new = placement(device, dtype)
        self.weight = self.make_parameter((num_gemms, out_features, in_features), **new)
        self.bias = (
            torch.nn.Parameter(torch.empty(num_gemms, out_features, **new)) if bias else None
        )
        self.register_load_state_dict_pre_hook(join_experts)
        self.reset_parameters()

    @property
    def num_groups(self) -> int:
        """G: under delayed scaling each expert has scales of its own."""
        return self.num_gemms

    def reset_parameters(self) -> None:
        """Draw each group's weight and bias as ``torch.nn.Linear`` does."""
        draw_linear_(self.weight, self.bias)

    def expert_state_dict(self) -> dict[str, Tensor]:
        """The state as ``weight0``, ``bias0`` and so on: views, for software that wants those."""
        return split_experts(self)

    @uncompiled
    def forward(self, x: Tensor, m_splits: Counts, out: Tensor | None = None) -> Tensor:
        """Multiply each group of rows by its weight.

        Args:
            x: ``(*, in_features)``; the leading dimensions are rows like any others.
            m_splits: Rows of each group: a list, or integers on the host or the device.
            out: A buffer for the result, of its shape; written in place, and returned as a
                tensor of its own, so that the buffer itself stays outside autograd.

        Raises:
            ShapeError, DtypeError, DeviceError: an argument does not fit the weight.
            RecipeError: ``save_original_input`` under a recipe that learns its scales.
            ConfigError: ``fuse_wgrad_accumulation`` and the weight has no ``main_grad``.
        """
        dtype = self.compute_dtype(x, self.in_features, self.weight)
        ends_G = group_ends(m_splits, self.num_gemms, x.shape[:-1].numel(), x.device)
        projection = self.projection(self.weight, dtype)
        keep = self.keep(projection.call, original=self.save_original_input)
        if out is not None:
            _check_out(out, torch.Size((*x.shape[:-1], self.out_features)), dtype, x.device)
            # A detached tensor shares memory and version with the caller's, and takes its
            # place in the graph: the caller's buffer can be handed in again next step.
            out = out.detach()
        return _GroupedLinear.apply(
            x.to(dtype), self.weight, self.bias, ends_G, out, Plan(projection, keep)
        )

    def extra_repr(self) -> str:
        """Say the sizes, as ``print(module)`` shows them."""
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.bias is not None}"
        )


def _check_out(out: Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
    if not isinstance(out, Tensor):
        raise DtypeError(
            f"out must be a tensor to write the result into, got {type(out).__name__}; leave it "
            "out for a new one"
        )
    if out.shape != shape:
        raise ShapeError(
            f"out must have the result's shape {tuple(shape)}, got {tuple(out.shape)}; "
            "allocate one row for each row of the input"
        )
    if out.dtype != dtype:
        raise DtypeError(f"out must be {dtype} like the result, got {out.dtype}; cast the buffer")
    if out.device != device:
        raise DeviceError(f"out must be on {device} like the input, got {out.device}; move it")
    if out.requires_grad:
        raise ConfigError(
            "out is written in place and must not require grad; pass out.detach(), or a buffer "
            "from torch.empty"
        )
