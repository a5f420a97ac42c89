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

from backstash import kernels
from backstash.errors import ShapeError
from backstash.nn import product
from backstash.nn.call import Call
from backstash.nn.operands import Columns
from backstash.nn.weight_grad import WeightGradient
from backstash.recipes import Operand, Phase
from backstash.tensors import QuantizedTensor, equal_groups
from backstash.weights.protocol import (
    materialize_weight_for_backward,
    materialize_weight_for_forward,
)

Read = TypeVar("Read", Tensor, Tensor | Columns)


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
        self, x_rows: Tensor, weight: Tensor, bias: Tensor | None, ends_G: Tensor | None = None
    ) -> Tensor:
        """Multiply an input that is already as the matmul reads it (``call.input_pair``)."""
        full = materialize_weight_for_forward(weight)[0]
        _check_full(full, (x_rows.shape[-1], 2 if ends_G is None else 3), weight)
        w_rows = self._weight(self.call.rows, full)
        bias = None if bias is None else bias.to(self.dtype)
        return product.output(
            x_rows, w_rows, bias, self.dtype, ends_G, decode_in_matmul=self._decode_in_matmul
        )

    def backward(
        self,
        dy_TN: Tensor,
        weight: Tensor,
        read_x: Callable[[], Tensor | Columns],
        needs: Needs,
        ends_G: Tensor | None = None,
    ) -> Gradients:
        """Give the gradients that ``needs`` names.

        ``read_x`` gives the columns of ``x`` when the weight gradient is computed, which may
        be long after this call.
        """
        full = materialize_weight_for_backward(weight)[0] if needs.x else None
        dy_rows, dy_columns = self._gradient_operands(dy_TN, full, needs, ends_G)
        dbias = self._bias_gradient(dy_TN, ends_G) if needs.bias else None
        dx = None
        if dy_rows is not None and full is not None:
            w_columns = self._weight(self.call.columns, full)
            dx = product.input_gradient(
                dy_rows, w_columns, self.dtype, ends_G, decode_in_matmul=self._decode_in_matmul
            )
            del w_columns
        del dy_rows, full
        if dy_columns is None:
            return Gradients(dx, None, dbias)

        def weight_gradient() -> Tensor:
            return product.weight_gradient(
                dy_columns, read_x(), self.dtype, ends_G, decode_in_matmul=self._decode_in_matmul
            )

        return Gradients(dx, self.weight_gradient.give(weight, weight_gradient), dbias)

    @property
    def _decode_in_matmul(self) -> bool:
        return self.call.recipe.decode_in_matmul

    def _gradient_operands(
        self, dy_TN: Tensor, full: Tensor | None, needs: Needs, ends_G: Tensor | None
    ) -> tuple[Tensor | None, Tensor | Columns | None]:
        if full is not None and needs.weight:
            turned = self._reads_turned(dy_TN, full.shape[-1], ends_G)
            return self.call.gradient_pair(dy_TN, ends_G, turned=turned)
        if needs.x:
            return self.call.rows(Operand.GRADIENT, dy_TN, ends_G), None
        if needs.weight:
            columns = self.call.columns(Operand.GRADIENT, dy_TN, ends_G)
            if isinstance(columns, Columns) and self.weight_gradient.queue is not None:
                # What waits for backward_dw() is kept in few bytes, not as it came.
                return None, columns.quantized()
            return None, columns
        return None, None

    def _reads_turned(self, dy_TN: Tensor, features: int, ends_G: Tensor | None) -> bool:
        """Whether the weight gradient follows at once, and reads codes that are turned."""
        if ends_G is None or self.weight_gradient.queue is not None:
            return False
        one, other = (
            self.call.format(operand, Phase.BACKWARD)
            for operand in (Operand.GRADIENT, Operand.INPUT)
        )
        sizes = dy_TN.shape[0], features, dy_TN.shape[1]
        return product.reads_turned((one, other), sizes, self.dtype, ends_G)

    def _bias_gradient(self, dy_TN: Tensor, ends_G: Tensor | None) -> Tensor:
        # Summed in float32 whatever the dtype of dy; autograd casts it to the bias's dtype.
        wide = torch.promote_types(dy_TN.dtype, torch.float32)
        if ends_G is None:
            return dy_TN.sum(0, dtype=wide)
        return kernels.group_sum(dy_TN.to(wide), ends_G)

    def _weight(self, read: Callable[..., Read], full: Tensor) -> Read:
        if isinstance(full, QuantizedTensor):
            return read(Operand.WEIGHT, full)
        full = full if full.dtype == self.dtype else full.to(self.dtype)
        if full.ndim == 2:
            return read(Operand.WEIGHT, full)
        # Blocks and scales start anew in each expert: its rows are a group of their own.
        G, N, _ = full.shape
        ends_G = equal_groups(G, N, full.device)
        return read(Operand.WEIGHT, full.flatten(0, 1), ends_G).view(full.shape)


def _check_full(full: Tensor, wanted: tuple[int, int], weight: Tensor) -> None:
    if (full.shape[-1], full.ndim) != wanted:
        raise ShapeError(
            f"the weight to multiply with must have {wanted[0]} input features and "
            f"{wanted[1]} dimensions, got {tuple(full.shape)} from {type(weight).__name__}; "
            "materialize_group_for_forward must give the full weight"
        )
