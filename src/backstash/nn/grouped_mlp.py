"""``GroupedMLP``: the feed-forward blocks of G experts, each for its own group of the rows.

Kept for backward are the input and the pre-activation.  With a :class:`RowMap` the rows are
gathered inside, so the input that is kept is the tokens themselves, once, not a copy for
each expert that a token was sent to.  With ``combined`` the outputs are added up inside as well,
and of their gradient, too, there are never more copies than a product needs at a time.

Letters: T tokens, K experts a token, R rows of the buffer (T without a row map), H model
features, F columns of the pre-activation, I columns of the activation, G groups.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from backstash import kernels
from backstash.errors import ConfigError, DeviceError, DtypeError, ShapeError
from backstash.kernels import InPages
from backstash.nn.experts import join_experts, split_experts
from backstash.nn.feed_forward import (
    Ahead,
    FeedForward,
    Noted,
    Once,
    Rows,
    Weights,
    checked_activation,
    preactivation_columns,
)
from backstash.nn.gathered import Gathered
from backstash.nn.group_ends import Counts, group_ends
from backstash.nn.grouped_plan import Placement, Plan
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
from backstash.nn.row_map import RowMap
from backstash.nn.weight_grad import Delivery
from backstash.recipes import Operand
from backstash.saving import differentiable_once, is_hooked, save_for_backward, taken_values


class Begun(NamedTuple):
    """What of a forward needs no rows: the matmuls under the recipe in force, and cast weights."""

    feed_forward: FeedForward
    ahead: Ahead | None


class _GroupedMLP(torch.autograd.Function):
    @staticmethod
    @outside_autocast
    def forward(ctx: Any, x: Tensor, prob_R: Tensor | None, *parameters_and_plan: Any) -> Tensor:
        *parameters, ends_G, source_R, slots_TK, valid, plan, ahead = parameters_and_plan
        weights, placement = Weights(*parameters), Placement(ends_G, source_R, slots_TK, valid)
        wanted = plan.wanted(ctx.needs_input_grad)
        with kernels.sharing_tables(ends_G, row_products=2):
            ran = plan.run(as_rows(x), placement, Rows(prob_R, ends_G), (weights, ahead), wanted)
        y_RH, kept, h, noted = ran
        if plan.keep is not Keep.NOTHING:
            # Only dx and further gathers read the map; only dh and the activation the rest.
            keeps_tokens = plan.is_gathered and wanted.weights.fc1_weight
            gathers = keeps_tokens or plan.is_combined
            placement = Placement(
                ends_G,
                source_R if gathers else None,
                slots_TK if wanted.x else None,
                valid if wanted.x else None,
            )
            save_for_backward(
                ctx,
                x if keeps_tokens else kept,
                prob_R,
                h,
                weights.fc1_weight,
                weights.fc2_weight,
                weights.fc2_bias if prob_R is not None else None,
                *noted.whole(),
                *placement,
            )
        ctx.plan = plan
        if plan.is_combined:
            return in_shape_of(kernels.unpermute(y_RH, slots_TK, valid), x)
        return y_RH if source_R is not None else in_shape_of(y_RH, x)

    @staticmethod
    @differentiable_once
    @outside_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        plan = ctx.plan
        wanted = plan.wanted(ctx.needs_input_grad)
        values, is_last = taken_values(ctx, plan.in_place(wanted))
        kept, prob_R, h, fc1_weight, fc2_weight, fc2_bias, *noted_and_placed = values
        del values
        h = Once(h, is_alone=is_last and not plan.is_hooked)
        placed = Placement(*noted_and_placed[2:])
        noted = Noted(*noted_and_placed[:2]).values(plan.feed_forward.fc1.dtype)
        del noted_and_placed
        ends_G, source_R, slots_TK, valid = placed
        fc1 = plan.feed_forward.fc1
        dy_RH = as_rows(dy)
        if plan.is_combined and source_R is not None:
            dy_RH = Gathered(dy_RH, source_R)

        def read_x() -> Tensor | Columns | Gathered | InPages:
            if not plan.is_gathered:
                return fc1.call.kept_operand(kept)
            return fc1.call.gathered_columns(Operand.INPUT, as_rows(kept), source_R, ends_G)

        rows = Rows(prob_R, ends_G, slots_TK if valid is None else None)
        parameters = Weights(fc1_weight, None, fc2_weight, fc2_bias), rows, noted
        # Gradients of tokens are made in two or three pieces.
        with kernels.sharing_tables(ends_G, row_products=3, column_products=2):
            gradients = plan.feed_forward.backward(dy_RH, h, read_x, parameters, wanted)
        dx, dprob_R, dweights = gradients
        if dx is not None and slots_TK is not None and valid is not None:
            dx = kernels.unpermute(dx, slots_TK, valid)
        if dx is not None and (slots_TK is None or plan.is_combined):
            dx = dx.view(*dy.shape[:-1], dx.shape[1])
        dprob_R = dprob_R if ctx.needs_input_grad[1] else None
        return dx, dprob_R, *dweights, *(None,) * _NO_PARAMETERS


# The placement, the plan and what was cast ahead: arguments of the function without a gradient.
_NO_PARAMETERS = 6


class GroupedMLP(Layer):
    """The feed-forward blocks of G experts.

    Args:
        num_gemms: G, the number of experts.
        hidden_size: H, features of input and output.
        ffn_hidden_size: I, columns of the activation; a gated one has twice as many before it.
        activation: ``gelu``, ``relu``, ``silu``, or gated ``swiglu``, ``geglu``, ``reglu``.
        name: By which recipes and reports know this layer.
        delay_wgrad_compute: Leave the weight gradients for :meth:`backward_dw`.
        fuse_wgrad_accumulation: Add the weight gradients to each weight's ``main_grad``.

    Parameters are ``fc1_weight`` ``(G, F, H)``, ``fc2_weight`` ``(G, H, I)`` and biases of
    one row each; a state dict with ``fc1_weight0``, ``fc1_weight1``, … loads as well.
    """

    def __init__(
        self,
        num_gemms: int,
        hidden_size: int,
        ffn_hidden_size: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str = "swiglu",
        name: str | None = None,
        delay_wgrad_compute: bool = False,
        fuse_wgrad_accumulation: bool = False,
    ) -> None:
        check_sizes(num_gemms=num_gemms, least=1)
        check_sizes(hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)
        check_flags(bias=bias)
        delivery = Delivery.of(fused=fuse_wgrad_accumulation)
        super().__init__(name=name, delivery=delivery, delayed=delay_wgrad_compute)
        self.num_gemms = num_gemms
        self.hidden_size = hidden_size
        self.ffn_hidden_size = ffn_hidden_size
        self.activation = checked_activation(activation)
        new = placement(device, dtype)
        columns = preactivation_columns(activation, ffn_hidden_size)
        fc1_shape, fc2_shape = (columns, hidden_size), (hidden_size, ffn_hidden_size)
        self.fc1_weight = self.make_parameter((num_gemms, *fc1_shape), linear="fc1", **new)
        self.fc2_weight = self.make_parameter((num_gemms, *fc2_shape), linear="fc2", **new)
        fc1_bias = torch.empty(num_gemms, columns, **new)
        fc2_bias = torch.empty(num_gemms, hidden_size, **new)
        self.fc1_bias = torch.nn.Parameter(fc1_bias) if bias else None
        self.fc2_bias = torch.nn.Parameter(fc2_bias) if bias else None
        self.register_load_state_dict_pre_hook(join_experts)
        self.reset_parameters()

    @property
    def num_groups(self) -> int:
        """G: under delayed scaling each expert has scales of its own."""
        return self.num_gemms

    def reset_parameters(self) -> None:
        """Draw each expert's weights and biases as ``torch.nn.Linear`` does."""
        draw_linear_(self.fc1_weight, self.fc1_bias)
        draw_linear_(self.fc2_weight, self.fc2_bias)

    def expert_state_dict(self) -> dict[str, Tensor]:
        """The state as ``fc1_weight0`` and so on: views, for software that wants those."""
        return split_experts(self)

    def begin(self, dtype: torch.dtype) -> Begun:
        """Begin a forward in ``dtype`` before its rows are known: cast the weights.

        A GPU has something to do then while the host finds out about the rows.  The next
        :meth:`forward` takes what this gives, once.
        """
        begun = self._begin(dtype)
        is_noted = self.keep(begun.feed_forward.fc1.call) is not Keep.NOTHING
        weights = Weights(self.fc1_weight, None, self.fc2_weight, None)
        return begun._replace(ahead=begun.feed_forward.cast(weights, is_noted=is_noted))

    @uncompiled
    def forward(
        self,
        x: Tensor,
        m_splits: Counts,
        probs: Tensor | None = None,
        *,
        rows: RowMap | None = None,
        combined: bool = False,
        begun: Begun | None = None,
    ) -> Tensor:
        """Run each expert on its group of rows.

        Args:
            x: ``(*, H)``, the rows sorted by expert; with ``rows``, the tokens as they come.
            m_splits: Rows of each expert: a list, or integers on the host or the device.
            probs: One weight for each row, multiplied onto the expert's output.
            rows: Which token each row copies; the rows are gathered inside, or, if it says how
                many are ``valid``, copied into a buffer that is kept for backward.
            combined: Add up the outputs of each token's rows, as ``kernels.unpermute`` does.
            begun: What :meth:`begin` gave for this call.

        Returns:
            ``(*, H)``; with ``rows``, ``(R, H)`` sorted by expert, unless they are ``combined``.
            Rows past the last group are zeros.

        Raises:
            ShapeError, DtypeError, DeviceError: an argument does not fit the weights.
            ConfigError: ``fuse_wgrad_accumulation`` and a weight has no ``main_grad``, or
                ``combined`` without ``rows``.
        """
        dtype = self.compute_dtype(x, self.hidden_size, self.fc1_weight)
        count = x.shape[:-1].numel()
        if rows is not None:
            _check_rows(rows, as_rows(x))
            count = rows.rows
            # Rows that come back do not say what shape the tokens had.
            x = x if combined else as_rows(x)
        elif combined:
            raise ConfigError(
                "combined adds up the rows of each token, and without rows nobody knows which "
                "these are; pass rows=RowMap(...), or leave combined out"
            )
        if probs is not None:
            _check_probs(probs, count, x.device)
        ends_G = group_ends(m_splits, self.num_gemms, count, x.device)
        feed_forward, ahead = self._begin(dtype) if begun is None else begun
        return _GroupedMLP.apply(
            x.to(dtype),
            probs,
            self.fc1_weight,
            self.fc1_bias,
            self.fc2_weight,
            self.fc2_bias,
            ends_G,
            None if rows is None else rows.source_R,
            None if rows is None else rows.slots_TK,
            None if rows is None else rows.valid,
            self._plan(feed_forward, rows, is_combined=combined),
            ahead,
        )

    def _begin(self, dtype: torch.dtype) -> Begun:
        feed_forward = FeedForward(
            self.projection(self.fc1_weight, dtype, "fc1"),
            self.projection(self.fc2_weight, dtype, "fc2"),
            self.activation,
        )
        return Begun(feed_forward, None)

    def _plan(self, feed_forward: FeedForward, rows: RowMap | None, *, is_combined: bool) -> Plan:
        # Of a sharded weight only a part is here, so it does not tell.
        hidden = preactivation_columns(self.activation, self.ffn_hidden_size)
        return Plan(
            feed_forward,
            self.keep(feed_forward.fc1.call),
            columns=(self.hidden_size, hidden),
            is_gathered=rows is not None and rows.valid is None,
            is_combined=is_combined,
            has_output_bias=self.fc2_bias is not None,
            is_hooked=is_hooked(),
        )

    def extra_repr(self) -> str:
        """Say the sizes, as ``print(module)`` shows them."""
        return (
            f"num_gemms={self.num_gemms}, hidden_size={self.hidden_size}, "
            f"ffn_hidden_size={self.ffn_hidden_size}, bias={self.fc1_bias is not None}, "
            f"activation={self.activation!r}"
        )


def _check_rows(rows: RowMap, x_TH: Tensor) -> None:
    if not isinstance(rows, RowMap):
        raise ConfigError(
            f"rows must be a RowMap, got {type(rows).__name__}; make one with RowMap.by_expert"
        )
    rows.check(x_TH)


def _check_probs(prob_R: Tensor, rows: int, device: torch.device) -> None:
    if not isinstance(prob_R, Tensor):
        raise DtypeError(
            f"probs must be a floating-point tensor, got {type(prob_R).__name__}; use float32"
        )
    if tuple(prob_R.shape) != (rows,):
        raise ShapeError(
            f"probs must have one weight for each of {rows} rows, got {tuple(prob_R.shape)}; "
            "gather the routing weights in the order of the rows"
        )
    if not prob_R.is_floating_point():
        raise DtypeError(f"probs must be floating-point, got {prob_R.dtype}; use float32")
    if prob_R.device != device:
        raise DeviceError(f"probs are on {prob_R.device}, the rows on {device}; move one of them")
