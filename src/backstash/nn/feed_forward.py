"""Two matmuls with an activation between them, for one weight pair or for G experts.

What backward needs of the middle is the pre-activation ``h`` alone: the activation is
elementwise, so it is computed again, and for a gated one ``h`` says both halves.  ``h`` may
be kept in a low-precision format if the recipe gives its role one.

A routing weight ``prob_T`` multiplies each row's activation, and so the whole output of the
expert: the second bias, which comes after the activation, is multiplied by it as well.

Letters: T rows, H model features, F columns of ``h``, I columns of the activation
(F = 2 I when gated), G groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backstash import kernels
from backstash.errors import ConfigError
from backstash.nn.call import Kept
from backstash.nn.operands import Columns
from backstash.nn.projection import Needs, Projection
from backstash.recipes import Operand


class Weights(NamedTuple):
    """The parameters, or their gradients, in the order in which the functions take them."""

    fc1_weight: Any
    fc1_bias: Any
    fc2_weight: Any
    fc2_bias: Any


class Rows(NamedTuple):
    """What belongs to the rows: their routing weights and the ends of their groups."""

    prob_T: Tensor | None
    ends_G: Tensor | None


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which gradients somebody waits for."""

    x: bool
    prob: bool
    weights: Weights

    @classmethod
    def nothing(cls) -> Wanted:
        return cls(False, False, Weights(False, False, False, False))

    @property
    def h(self) -> bool:
        return self.x or self.prob or self.weights.fc1_weight or self.weights.fc1_bias

    @property
    def fc1(self) -> Needs:
        return Needs(self.x, self.weights.fc1_weight, self.weights.fc1_bias)

    @property
    def fc2(self) -> Needs:
        return Needs(self.h, self.weights.fc2_weight, self.weights.fc2_bias)


@dataclasses.dataclass(frozen=True)
class FeedForward:
    """The two projections and the activation between them."""

    fc1: Projection
    fc2: Projection
    activation: str

    def forward(
        self, x_rows: Tensor, weights: Weights, rows: Rows, wanted: Wanted
    ) -> tuple[Tensor, Kept | None]:
        """Give the output and ``h`` to save; ``x_rows`` is as the first matmul reads it."""
        h_TF = self.fc1.forward(x_rows, weights.fc1_weight, weights.fc1_bias, rows.ends_G)
        a_TI = kernels.activate(h_TF, rows.prob_T, self.activation)
        a_rows = self.fc2.call.rows(Operand.INPUT, a_TI, rows.ends_G)
        fc2_bias = weights.fc2_bias if rows.prob_T is None else None
        y_TH = self.fc2.forward(a_rows, weights.fc2_weight, fc2_bias, rows.ends_G)
        if weights.fc2_bias is not None and rows.prob_T is not None:
            bias_TH = _bias_rows(y_TH, weights.fc2_bias, rows)
            y_TH = y_TH + (bias_TH * _valid(rows.prob_T, rows).unsqueeze(1)).to(y_TH.dtype)
        if not wanted.fc2.matmul:
            return y_TH, None
        return y_TH, self.fc1.call.keep_preactivation(h_TF, rows.ends_G)

    def backward(
        self,
        dy_TH: Tensor,
        kept_h: Any,
        read_x: Callable[[], Tensor | Columns],
        parameters: tuple[Weights, Rows],
        wanted: Wanted,
    ) -> tuple[Tensor | None, Tensor | None, Weights]:
        """Give the gradients of the rows, of the routing weights and of the parameters."""
        weights, rows = parameters

        def read_a() -> Tensor | Columns:
            h_TF = self.fc1.call.kept_values(kept_h)
            a_TI = kernels.activate(h_TF, rows.prob_T, self.activation)
            return self.fc2.call.columns(Operand.INPUT, a_TI, rows.ends_G)

        needs = wanted.fc2 if rows.prob_T is None else wanted.fc2._replace(bias=False)
        fc2 = self.fc2.backward(dy_TH, weights.fc2_weight, read_a, needs, rows.ends_G)
        fc2_bias = fc2.bias
        if rows.prob_T is not None and wanted.weights.fc2_bias:
            weighted_TH = dy_TH * _valid(rows.prob_T, rows).unsqueeze(1)
            fc2_bias = kernels.group_sum(weighted_TH, _ends(rows))
        if fc2.x is None:
            return None, None, Weights(None, None, fc2.weight, fc2_bias)
        h_TF = self.fc1.call.kept_values(kept_h)
        dh_TF, dprob_T = kernels.activate_backward(fc2.x, h_TF, rows.prob_T, self.activation)
        if dprob_T is not None and weights.fc2_bias is not None:
            bias_TH = _bias_rows(dy_TH, weights.fc2_bias, rows)
            dprob_T = dprob_T + (dy_TH * bias_TH).sum(1, dtype=torch.float32).to(dprob_T.dtype)
        if dprob_T is not None:
            dprob_T = _valid(dprob_T, rows)
        fc1 = self.fc1.backward(dh_TF, weights.fc1_weight, read_x, wanted.fc1, rows.ends_G)
        return fc1.x, dprob_T, Weights(fc1.weight, fc1.bias, fc2.weight, fc2_bias)


def checked_activation(activation: str) -> str:
    """The name of an activation that there is.

    Raises:
        ConfigError: there is none of that name.
    """
    if activation not in kernels.ACTIVATIONS:
        raise ConfigError(
            f"activation must be one of {', '.join(kernels.ACTIVATIONS)}, got {activation!r}; "
            "pick one of these"
        )
    return activation


def preactivation_columns(activation: str, ffn_hidden_size: int) -> int:
    """F: a gated activation reads two columns for each that it gives."""
    return ffn_hidden_size * (2 if kernels.ACTIVATIONS[activation] else 1)


def _bias_rows(like_TH: Tensor, bias_GH: Tensor, rows: Rows) -> Tensor:
    """Each row's bias in float32, zeros in the tail."""
    wide = torch.promote_types(bias_GH.dtype, torch.float32)
    zeros_TH = torch.zeros(like_TH.shape, dtype=wide, device=like_TH.device)
    return kernels.add_group_bias(zeros_TH, bias_GH.to(wide), _ends(rows))


def _valid(value_T: Tensor, rows: Rows) -> Tensor:
    """``value_T`` with zeros in the tail, which may hold anything."""
    row_T = torch.arange(value_T.shape[0], device=value_T.device)
    return value_T.where(row_T < _ends(rows)[-1], 0)


def _ends(rows: Rows) -> Tensor:
    assert rows.ends_G is not None, "routing weights come with groups"
    return rows.ends_G
