"""Two matmuls with an activation between them, for one weight pair or for G experts.

What backward needs of the middle is the pre-activation ``h`` alone: the activation is
elementwise, so it is computed again, in the pass that reads ``h`` for its gradient, and for a
gated one ``h`` says both halves.  ``h`` may be kept in a low-precision format if the recipe gives
its role one.  It goes as soon as that pass is over.

A routing weight ``prob_T`` multiplies each row's activation, and so the whole output of the
expert: the second bias, which comes after the activation, is multiplied by it as well.

Letters: T rows, H model features, F columns of ``h``, I columns of the activation
(F = 2 I when gated), G groups.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from backstash import kernels
from backstash.errors import ConfigError
from backstash.formats import Float8Rowwise, HighPrecisionFormat, Usage
from backstash.kernels import InPages, PagedRows, Slabs
from backstash.nn.activated import BothWays, activated_rows, gradient_codes
from backstash.nn.call import CastWeight, Kept
from backstash.nn.gathered import Gathered, matrix
from backstash.nn.operands import Columns
from backstash.nn.projection import Groups, Needs, Projection
from backstash.recipes import Operand, Phase

Value = TypeVar("Value")


class Once(Generic[Value]):
    """A value that is given away once, and goes as soon as whoever took it is done with it.

    Where ``is_alone`` nobody else holds it, so its memory may be written as well.
    """

    def __init__(self, value: Value, *, is_alone: bool = False) -> None:
        self._values = [value]
        self.is_alone = is_alone

    def take(self) -> Value:
        return self._values.pop()


class Weights(NamedTuple):
    """The parameters, or their gradients, in the order in which the functions take them."""

    fc1_weight: Any
    fc1_bias: Any
    fc2_weight: Any
    fc2_bias: Any


class Rows(NamedTuple):
    """What belongs to the rows: their routing weights, the ends of their groups, their tokens.

    The routing weights may be in pages in backward, if there is no bias of the output.
    With ``slots_TK``, the rows of each token, gradients of rows are wanted added up.
    """

    prob_T: Any
    ends_G: Tensor | None
    slots_TK: Tensor | None = None


class Noted(NamedTuple):
    """Of each weight the largest magnitudes of its columns, if forward has noted them."""

    fc1: Tensor | None = None
    fc2: Tensor | None = None

    def whole(self) -> Noted:
        """The same as whole numbers, which nobody who keeps saved values rounds."""
        whole = {2: torch.int16, 4: torch.int32}
        return Noted(*(None if amax is None else amax.view(whole[amax.itemsize]) for amax in self))

    def values(self, dtype: torch.dtype) -> Noted:
        """What :meth:`whole` was made of, in a layer of this dtype."""
        dtype = dtype if dtype.itemsize == 2 else torch.float32
        return Noted(*(None if bits is None else bits.view(dtype) for bits in self))


class Ahead(NamedTuple):
    """Both weights as forward multiplies them, cast before the rows are known."""

    fc1: Once[CastWeight]
    fc2: Once[CastWeight]


class Output(NamedTuple):
    """What forward gives: the output, and what backward needs of the middle and the weights."""

    y_TH: Tensor
    h: Kept | None
    noted: Noted


class _Middle(NamedTuple):
    """Gradients of ``h`` and of the routing weights, and the activation; None where unwanted."""

    dh_TF: Tensor | BothWays | None
    dprob_T: Tensor | None
    a_TI: Tensor | Columns | None


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

    def cast(self, weights: Weights, *, is_noted: bool) -> Ahead | None:
        """Cast both weights, which takes nothing of the rows; None where one of them is not cast.

        ``is_noted`` where backward will follow.
        """
        both = (self.fc1, weights.fc1_weight), (self.fc2, weights.fc2_weight)
        if not all(projection.casts(weight) for projection, weight in both):
            return None
        with torch.no_grad():
            fc1, fc2 = (
                Once(projection.cast(weight, (weight.shape[-1], 3), is_noted=is_noted))
                for projection, weight in both
            )
        return Ahead(fc1, fc2)

    def forward(
        self,
        x_rows: Once[Tensor | Gathered],
        weights: Weights,
        rows: Rows,
        wanted: Wanted,
        ahead: Ahead | None = None,
    ) -> Output:
        """Give the output and what to save; ``x_rows`` is as the first matmul reads it.

        ``ahead`` is what :meth:`cast` gave before.
        """
        first, second = (None, None) if ahead is None else ahead
        fc1 = self.fc1, weights.fc1_weight, weights.fc1_bias
        h_TF, fc1_amax = _product(fc1, x_rows, rows.ends_G, first, is_noted=wanted.x)
        y_TH, fc2_amax = self._output(h_TF, weights, rows, second, is_noted=wanted.h)
        noted = Noted(fc1_amax, fc2_amax)
        if not wanted.fc2.matmul:
            return Output(y_TH, None, noted)
        return Output(y_TH, self.fc1.call.keep_preactivation(h_TF, rows.ends_G), noted)

    def forward_in_slabs(self, x: Slabs, h: Slabs, weights: Weights, rows: Rows) -> Tensor:
        """Give the output of rows in slabs, and write their ``h`` into others.

        Only where :meth:`computes_in_slabs` says so.
        """
        self.fc1.forward_in_slabs(x, weights.fc1_weight, h)
        return self._output(h, weights, rows)[0]

    def computes_in_slabs(self, weights: Weights) -> bool:
        """Whether all that writes or reads the input and ``h`` takes plain values in slabs."""
        calls = (
            (self.fc1.call, Operand.INPUT, Phase.FORWARD),
            (self.fc1.call, Operand.INPUT, Phase.BACKWARD),
            (self.fc1.call, Operand.WEIGHT, Phase.FORWARD),
            (self.fc1.call, Operand.PREACTIVATION, Phase.BACKWARD),
            (self.fc2.call, Operand.INPUT, Phase.FORWARD),
        )
        if weights.fc1_bias is not None or not self.fc1.multiplies_pages:
            return False
        return all(isinstance(c.format(o, p), HighPrecisionFormat) for c, o, p in calls)

    def _output(
        self,
        h_TF: Tensor | Slabs,
        weights: Weights,
        rows: Rows,
        ahead: Once[CastWeight] | None = None,
        *,
        is_noted: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """What the activation and the second matmul make of ``h``, and what its weight notes."""
        a_rows = activated_rows(self.fc2.call, h_TF, rows.prob_T, self.activation, rows.ends_G)
        fc2_bias = weights.fc2_bias if rows.prob_T is None else None
        fc2 = self.fc2, weights.fc2_weight, fc2_bias
        given: Once[Tensor | Gathered] = Once(a_rows)
        del a_rows
        y_TH, amax_GK = _product(fc2, given, rows.ends_G, ahead, is_noted=is_noted)
        if weights.fc2_bias is not None and rows.prob_T is not None:
            bias_TH = _bias_rows(y_TH, weights.fc2_bias, rows)
            y_TH = y_TH + (bias_TH * _valid(rows.prob_T, rows).unsqueeze(1)).to(y_TH.dtype)
        return y_TH, amax_GK

    def backward(
        self,
        dy_TH: Tensor | Gathered,
        kept_h: Once[Any],
        read_x: Callable[[], Tensor | Columns | Gathered | InPages],
        parameters: tuple[Weights, Rows, Noted],
        wanted: Wanted,
    ) -> tuple[Tensor | None, Tensor | None, Weights]:
        """Give the gradients of the rows, of the routing weights and of the parameters.

        With ``rows.slots_TK`` that of the rows is added up over each token's.
        """
        weights, rows, noted = parameters
        if weights.fc2_bias is not None or wanted.weights.fc2_bias:
            dy_TH = matrix(dy_TH)
        needs = wanted.fc2._replace(bias=False)
        full = self.fc2.backward_weight(weights.fc2_weight, needs)
        dy = self.fc2.gradient_operands(dy_TH, full, needs, rows.ends_G)
        read_w = None
        if full is not None:
            read_w = functools.partial(self.fc2.weight_columns, full, noted.fc2)
        middle = self._through_activation(dy, read_w, kept_h, rows, wanted)
        del read_w
        dy_columns = dy[1]
        del dy, full
        dh_TF, dprob_T, a_TI = middle
        del middle
        dfc2_weight = None
        if a_TI is not None:
            read_a = functools.partial(self.fc2.call.columns, Operand.INPUT, a_TI, rows.ends_G)
            dfc2_weight = self.fc2.deliver(weights.fc2_weight, dy_columns, read_a, rows.ends_G)
            del read_a
        del a_TI, dy_columns
        dfc2_bias, dprob_T = self._bias_gradients(dy_TH, dprob_T, (weights, rows), wanted)
        if dh_TF is None:
            return None, None, Weights(None, None, dfc2_weight, dfc2_bias)
        groups = Groups(rows.ends_G, rows.slots_TK, noted.fc1)
        fc1 = self.fc1.backward(dh_TF, weights.fc1_weight, read_x, wanted.fc1, groups)
        return fc1.x, dprob_T, Weights(fc1.weight, fc1.bias, dfc2_weight, dfc2_bias)

    def _through_activation(
        self,
        dy: tuple[Tensor | Gathered | None, Tensor | Columns | Gathered | None],
        read_w: Callable[[], Tensor | Columns] | None,
        kept_h: Once[Any],
        rows: Rows,
        wanted: Wanted,
    ) -> _Middle:
        """The gradients of ``h`` and of the routing weights, and the activation again."""
        if not wanted.fc2.matmul:
            return _Middle(None, None, None)
        dy_rows, dy_columns = dy
        h_TF, prob_T = self.fc1.call.kept_values(kept_h.take()), rows.prob_T
        if dy_rows is None or read_w is None:
            return _Middle(None, None, kernels.activate(h_TF, prob_T, self.activation, rows.ends_G))
        da_TI = self.fc2.input_gradient(dy_rows, read_w(), rows.ends_G)
        formats = self._formats_of_codes(h_TF, dy_columns, rows, wanted)
        if formats is not None and rows.ends_G is not None:
            given = da_TI, h_TF, prob_T, self.activation, rows.ends_G
            return _Middle(*gradient_codes(*given, formats))
        # What is not read again makes room: the activation takes the place of its gradient, and
        # the gradient of h that of h.
        dh_TF = h_TF if kept_h.is_alone else da_TI.new_empty(h_TF.shape, dtype=h_TF.dtype)
        dprob_T = None
        if prob_T is not None:
            dprob_T = da_TI.new_empty(prob_T.shape, dtype=prob_T.dtype)
        a_TI = da_TI if wanted.weights.fc2_weight else None
        into = kernels.ActivationGradients(dh_TF, dprob_T, a_TI)
        kernels.activate_backward(da_TI, h_TF, prob_T, self.activation, into, rows.ends_G)
        return _Middle(dh_TF, dprob_T, a_TI)

    def _formats_of_codes(
        self,
        h_TF: Tensor | InPages,
        dy_columns: Tensor | Columns | Gathered | None,
        rows: Rows,
        wanted: Wanted,
    ) -> tuple[Float8Rowwise, Float8Rowwise] | None:
        """Of the gradient of ``h`` and of the activation, if all that reads them takes codes."""
        weights, ends_G = wanted.weights, rows.ends_G
        if not (wanted.x and weights.fc1_weight) or weights.fc1_bias or ends_G is None:
            return None
        if not isinstance(dy_columns, Columns) or isinstance(rows.prob_T, PagedRows):
            return None
        if isinstance(h_TF, InPages) or not self.fc1.reads_turned(
            h_TF, dy_columns.shape[1], ends_G
        ):
            return None
        of_dh = self.fc1.call.format(Operand.GRADIENT, Phase.BACKWARD)
        of_a = self.fc2.call.format(Operand.INPUT, Phase.BACKWARD).along(Usage.COLUMNWISE)
        if isinstance(of_dh, Float8Rowwise) and isinstance(of_a, Float8Rowwise):
            return of_dh, of_a
        return None

    def _bias_gradients(
        self,
        dy_TH: Tensor | Gathered,
        dprob_T: Tensor | None,
        parameters: tuple[Weights, Rows],
        wanted: Wanted,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The second bias's gradient, and that of the routing weights with the bias's share."""
        weights, rows = parameters
        dbias = None
        if wanted.weights.fc2_bias:
            dy = matrix(dy_TH)
            if rows.prob_T is not None:
                dy = dy * _valid(rows.prob_T, rows).unsqueeze(1)
            dbias = self.fc2.bias_gradient(dy, rows.ends_G)
        if dprob_T is not None and weights.fc2_bias is not None:
            dy = matrix(dy_TH)
            bias_TH = _bias_rows(dy, weights.fc2_bias, rows)
            dprob_T = dprob_T + (dy * bias_TH).sum(1).to(dprob_T.dtype)
            dprob_T = _valid(dprob_T, rows)
        return dbias, dprob_T


def _product(
    matmul: tuple[Projection, Tensor, Tensor | None],
    x_rows: Once[Tensor | Gathered],
    ends_G: Tensor | None,
    ahead: Once[CastWeight] | None = None,
    *,
    is_noted: bool,
) -> tuple[Tensor, Tensor | None]:
    """Multiply by a weight, cast here or before, and give what was noted of its columns."""
    projection, weight, bias = matmul
    x = x_rows.take()
    if ahead is not None:
        cast = ahead.take()
    else:
        dims = 2 if ends_G is None else 3
        cast = projection.cast(weight, (x.shape[-1], dims), is_noted=is_noted)
    y = projection.multiply(x, cast.rows, bias, ends_G)
    if not is_noted or cast.parts_GPK is None:
        return y, None
    # After the product, which a GPU should not have to wait for.
    return y, kernels.largest_of_parts(cast.parts_GPK)


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
