"""One matmul of a module, ``y = x w^T + b``, forward and backward, for one weight or G.

Three products share two operands each, and every operand is quantized along the direction
that its product adds up over::

    y  = row(x)  row(w)^T        forward
    dx = row(dy) col(w)          input gradient
    dw = col(dy)^T col(x)        weight gradient

So after forward only the columns of ``x`` are needed, and the weight itself, which is never
copied: backward quantizes its columns from the very object that forward saw, after asking
it for its full self where it is only a shard.  With ``ends_G`` the rows are in groups, each
multiplied by its own slice of a weight ``(G, N, K)``.  What multiplies two operands is decided
in :mod:`backstash.nn.product`.

Letters: T rows, K input features, N output features, G groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from backstash import kernels
from backstash.errors import ShapeError
from backstash.formats import Float8Rowwise, HighPrecisionFormat
from backstash.kernels import InPages, PagedRows, Slabs
from backstash.nn import gathered, product
from backstash.nn.activated import BothWays
from backstash.nn.call import Call, CastWeight
from backstash.nn.gathered import Gathered, matrix
from backstash.nn.operands import Columns
from backstash.nn.weight_grad import WeightGradient
from backstash.recipes import Operand, Phase
from backstash.tensors import QuantizedTensor, equal_groups
from backstash.weights.protocol import (
    is_distributed_weight,
    materialize_weight_for_backward,
    materialize_weight_for_forward,
)

Read = TypeVar("Read", Tensor, Tensor | Columns)


class Groups(NamedTuple):
    """What backward of a projection knows of the groups beside its operands.

    Attributes:
        ends_G: The ends of the groups of rows; None for one weight.
        slots_TK: The rows of each token, if the gradient of ``x`` is wanted added up over them.
        amax_GK: The largest magnitudes of the weight's columns, if forward has noted them.
    """

    ends_G: Tensor | None = None
    slots_TK: Tensor | None = None
    amax_GK: Tensor | None = None


class Needs(NamedTuple):
    """Which gradients of a projection somebody waits for, as autograd lists its inputs."""

    x: bool
    weight: bool
    bias: bool

    @property
    def matmul(self) -> bool:
        """Whether backward multiplies anything; a bias gradient is only a sum."""
        return self.x or self.weight


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Gradients of one projection; ``None`` where nobody waits, or it went elsewhere."""

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


@dataclasses.dataclass(frozen=True)
class Projection:
    """A matmul with the recipe it runs under, its dtype, and where its weight gradient goes."""

    call: Call
    weight_gradient: WeightGradient
    dtype: torch.dtype

    def forward(
        self,
        x_rows: Tensor | Gathered,
        weight: Tensor,
        bias: Tensor | None,
        ends_G: Tensor | None = None,
    ) -> Tensor:
        """Multiply an input that is already as the matmul reads it (``call.input_pair``)."""
        cast = self.cast(weight, (x_rows.shape[-1], 2 if ends_G is None else 3))
        return self.multiply(x_rows, cast.rows, bias, ends_G)

    def cast(
        self, weight: Tensor, wanted: tuple[int, int], *, is_noted: bool = False
    ) -> CastWeight:
        """The weight as forward's matmul reads it; with notes, if they are wanted and help.

        ``wanted`` are how many input features and dimensions it must have.
        """
        full = materialize_weight_for_forward(weight)[0]
        _check_full(full, wanted, weight)
        # What a provider gives for backward need not be what it gave for forward.
        if is_noted and full is weight and not isinstance(full, QuantizedTensor):
            full = full if full.dtype == self.dtype else full.to(self.dtype)
            if (cast := self.call.noted_weight(full)) is not None:
                return cast
        return CastWeight(self._weight(self.call.rows, full, Phase.FORWARD))

    def casts(self, weight: Tensor) -> bool:
        """Whether forward casts a weight that is all here, in plain values."""
        if isinstance(weight, QuantizedTensor) or is_distributed_weight(weight):
            return False
        format = self.call.format(Operand.WEIGHT, Phase.FORWARD)
        return not isinstance(format, HighPrecisionFormat)

    def multiply(
        self,
        x_rows: Tensor | Gathered,
        w_rows: Tensor,
        bias: Tensor | None,
        ends_G: Tensor | None = None,
    ) -> Tensor:
        """Multiply an input and a weight that are both as the matmul reads them."""
        bias = None if bias is None else bias.to(self.dtype)
        if isinstance(x_rows, Gathered) and ends_G is not None and _are_plain(self.dtype, w_rows):
            y_TN = kernels.gathered_mm(x_rows.values_TH, w_rows, ends_G, x_rows.source_R)
            return y_TN if bias is None else kernels.add_group_bias(y_TN, bias, ends_G)
        return product.output(
            x_rows,
            w_rows,
            bias,
            self.dtype,
            ends_G,
            decode_in_matmul=self._decode_in_matmul,
        )

    def forward_in_slabs(self, x: Slabs, weight: Tensor, into: Slabs) -> None:
        """Multiply rows in slabs by plain weights, without a bias, into slabs of one launch."""
        full = materialize_weight_for_forward(weight)[0]
        _check_full(full, (x.shape[1], 3), weight)
        kernels.grouped_mm_in_slabs(x, product.values(full, self.dtype), into)

    def backward(
        self,
        dy_TN: Tensor | BothWays,
        weight: Tensor,
        read_x: Callable[[], Tensor | Columns | Gathered | InPages],
        needs: Needs,
        groups: Groups = Groups(),  # noqa: B008  # nothing can write it
    ) -> Gradients:
        """Give the gradients that ``needs`` names.

        ``read_x`` gives the columns of ``x`` when the weight gradient is computed, which may
        be long after this call.
        """
        ends_G, slots_TK, amax_GK = groups
        full = self.backward_weight(weight, needs)
        dy_rows, dy_columns = self.gradient_operands(dy_TN, full, needs, ends_G)
        dbias = None
        if needs.bias and not isinstance(dy_TN, BothWays):
            dbias = self.bias_gradient(dy_TN, ends_G)
        dx = None
        if dy_rows is not None and full is not None:
            w_columns = self.weight_columns(full, amax_GK)
            if slots_TK is not None and ends_G is not None:
                dx = self._token_gradient(matrix(dy_rows), w_columns, ends_G, slots_TK)
            else:
                dx = self.input_gradient(dy_rows, w_columns, ends_G)
            del w_columns
        del dy_rows, full
        dweight = self.deliver(weight, dy_columns, read_x, ends_G)
        return Gradients(dx, dweight, dbias)

    def backward_weight(self, weight: Tensor, needs: Needs) -> Tensor | None:
        """The full weight, if the input gradient is wanted, which reads it."""
        return materialize_weight_for_backward(weight)[0] if needs.x else None

    def weight_columns(self, full: Tensor, amax_GK: Tensor | None = None) -> Tensor | Columns:
        """The weight as the input gradient reads it; ``amax_GK`` is what forward noted of it."""
        columns = self._weight(self.call.columns, full, Phase.BACKWARD)
        if amax_GK is None or not isinstance(columns, Columns):
            return columns
        return dataclasses.replace(columns, amax_GK=amax_GK)

    def input_gradient(
        self, dy_rows: Tensor | Gathered, w_columns: Tensor | Columns, ends_G: Tensor | None
    ) -> Tensor:
        """Multiply operands that are already as the matmul reads them."""
        if isinstance(dy_rows, Gathered) and ends_G is not None:
            is_code = isinstance(w_columns, Columns)
            if not is_code and _are_plain(self.dtype, dy_rows, w_columns):
                values_TN, source_R = dy_rows.values_TH, dy_rows.source_R
                return kernels.gathered_mm_dx(values_TN, w_columns, ends_G, source_R)
        return product.input_gradient(
            dy_rows, w_columns, self.dtype, ends_G, decode_in_matmul=self._decode_in_matmul
        )

    def _token_gradient(
        self, dy_rows: Tensor, w_columns: Tensor | Columns, ends_G: Tensor, slots_TK: Tensor
    ) -> Tensor:
        """:meth:`input_gradient`, added up over each token's rows."""
        if not isinstance(w_columns, Columns) and _are_plain(self.dtype, dy_rows, w_columns):
            return gathered.token_gradient(dy_rows, w_columns, ends_G, slots_TK)
        dx_RK = self.input_gradient(dy_rows, w_columns, ends_G)
        return kernels.unpermute(dx_RK, slots_TK)

    def deliver(
        self,
        weight: Tensor,
        dy_columns: Tensor | Columns | Gathered | None,
        read_x: Callable[[], Tensor | Columns | Gathered | InPages],
        ends_G: Tensor | None,
    ) -> Tensor | None:
        """Compute the weight gradient, now or later; returns what autograd receives for it."""
        if dy_columns is None:
            return None

        def weight_gradient() -> Tensor:
            dy, x = dy_columns, read_x()
            if not isinstance(dy, Columns) and not isinstance(x, Columns):
                is_elsewhere = isinstance(dy, Gathered) or isinstance(x, Gathered | InPages)
                if is_elsewhere and ends_G is not None and _are_plain(self.dtype, dy, x):
                    return gathered.weight_gradient(dy, x, ends_G)
            dy = dy.matrix() if isinstance(dy, Gathered) else dy
            x = x.matrix() if isinstance(x, Gathered) else x
            return product.weight_gradient(
                dy,
                x,  # pyright: ignore[reportArgumentType]  # never pages beside what is quantized
                self.dtype,
                ends_G,
                decode_in_matmul=self._decode_in_matmul,
            )

        return self.weight_gradient.give(weight, weight_gradient)

    @property
    def multiplies_pages(self) -> bool:
        """May :meth:`deliver` read the input in pages: at once, beside a plain gradient?"""
        format = self.call.format(Operand.GRADIENT, Phase.BACKWARD)
        return self.weight_gradient.queue is None and isinstance(format, HighPrecisionFormat)

    @property
    def _decode_in_matmul(self) -> bool:
        return self.call.recipe.decode_in_matmul

    def gradient_operands(
        self,
        dy_TN: Tensor | Gathered | BothWays,
        full: Tensor | None,
        needs: Needs,
        ends_G: Tensor | None,
    ) -> tuple[Tensor | Gathered | None, Tensor | Columns | Gathered | None]:
        """The output gradient as each of the wanted products reads it."""
        if isinstance(dy_TN, BothWays):
            return dy_TN
        if full is not None and needs.weight:
            turned = self.reads_turned(dy_TN, full.shape[-1], ends_G)
            return self.call.gradient_pair(dy_TN, ends_G, turned=turned)
        if needs.x:
            return self.call.rows(Operand.GRADIENT, matrix(dy_TN), ends_G), None
        if needs.weight:
            columns = self.call.columns(Operand.GRADIENT, matrix(dy_TN), ends_G)
            if isinstance(columns, Columns) and self.weight_gradient.queue is not None:
                # What waits for backward_dw() is kept in few bytes, not as it came.
                return None, columns.quantized()
            return None, columns
        return None, None

    def reads_turned(self, dy_TN: Tensor | Gathered, features: int, ends_G: Tensor | None) -> bool:
        """Whether the weight gradient follows at once, and reads codes that are turned."""
        if ends_G is None or self.weight_gradient.queue is not None:
            return False
        one = self.call.format(Operand.GRADIENT, Phase.BACKWARD)
        if not isinstance(one, Float8Rowwise):
            return False
        other = self.call.format(Operand.INPUT, Phase.BACKWARD)
        sizes = dy_TN.shape[0], features, dy_TN.shape[1]
        return product.reads_turned((one, other), sizes, self.dtype, ends_G)

    def bias_gradient(self, dy_TN: Tensor, ends_G: Tensor | None) -> Tensor:
        """Add up the output gradient, over all rows or over each group's."""
        # Summed in float32 whatever the dtype of dy; autograd casts it to the bias's dtype.
        wide = torch.promote_types(dy_TN.dtype, torch.float32)
        if ends_G is None:
            return dy_TN.sum(0, dtype=wide)
        return kernels.group_sum(dy_TN.to(wide), ends_G)

    def _weight(self, read: Callable[..., Read], full: Tensor, phase: Phase) -> Read | Tensor:
        if isinstance(full, QuantizedTensor):
            return read(Operand.WEIGHT, full)
        full = full if full.dtype == self.dtype else full.to(self.dtype)
        if isinstance(self.call.format(Operand.WEIGHT, phase), HighPrecisionFormat):
            return full
        if full.ndim == 2:
            return read(Operand.WEIGHT, full)
        # Blocks and scales start anew in each expert: its rows are a group of their own.
        G, N, _ = full.shape
        ends_G = equal_groups(G, N, full.device)
        return read(Operand.WEIGHT, full.flatten(0, 1), ends_G).view(full.shape)


def _are_plain(dtype: torch.dtype, *operands: Tensor | Gathered | InPages) -> bool:
    """Whether these are values of the layer's dtype, and no codes."""
    held = (one.values_TH if isinstance(one, Gathered) else one for one in operands)
    return all(type(one) in _PLAIN and one.dtype == dtype for one in held)


# No subclass: what it multiplies is its own.
_PLAIN = frozenset((Tensor, Parameter, PagedRows, Slabs))


def _check_full(full: Tensor, wanted: tuple[int, int], weight: Tensor) -> None:
    if (full.shape[-1], full.ndim) != wanted:
        raise ShapeError(
            f"the weight to multiply with must have {wanted[0]} input features and "
            f"{wanted[1]} dimensions, got {tuple(full.shape)} from {type(weight).__name__}; "
            "materialize_group_for_forward must give the full weight"
        )
