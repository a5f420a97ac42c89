"""Getting rows to their experts, and the results back to their tokens.

A dispatcher is two functions around the experts.  ``dispatch`` says which rows they get,
``combine`` adds up what they return.  :class:`Local` keeps every row where it is; other
dispatchers send rows to the ranks that hold the experts, and plug in at the same place.

With :class:`Local` the tokens are not even copied here: the experts are given the tokens as
they are and the row map, and gather while they multiply.  So the tokens are saved once for
backward, not once per expert they go to.

Letters: T tokens, K experts a token, R rows (T * K), H features, E experts.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch
from torch import Tensor

from backstash import kernels
from backstash.moe.router import Routing
from backstash.nn import RowMap
from backstash.saving import save_for_backward, saved_values


@dataclasses.dataclass(frozen=True)
class Dispatched:
    """What the experts of this rank work on."""

    x: Tensor
    """Rows in the experts' order, or, with ``rows``, the tokens they are gathered from."""
    counts_E: Tensor
    """int32: rows of each expert, on the device."""
    prob_R: Tensor
    """Weight of each row, in the experts' order."""
    rows: RowMap | None
    """How rows and tokens correspond; ``None`` if ``x`` is rows already."""


class Dispatcher(Protocol):
    """The two functions around the experts."""

    def dispatch(self, x_TH: Tensor, routing: Routing) -> Dispatched:
        """Say which rows the experts of this rank get."""
        ...

    def combine(self, y_RH: Tensor, sent: Dispatched) -> Tensor:
        """Add up the experts' rows into ``(T, H)``, the tokens' order."""
        ...


class Local:
    """Every expert is on this rank: rows are sorted, none is sent and none is dropped."""

    def dispatch(self, x_TH: Tensor, routing: Routing) -> Dispatched:
        """Sort the rows by expert; the tokens themselves stay as they are."""
        num_experts = routing.counts_E.shape[0]
        source_R, slots_TK, counts_E = kernels.sort_by_expert(routing.expert_TK, num_experts)
        prob_TK = routing.prob_TK
        # Each row is written once, so this is a permutation, and its gradient is a gather.
        prob_R = prob_TK.new_zeros(source_R.shape).scatter(0, slots_TK.flatten(), prob_TK.flatten())
        return Dispatched(x_TH, counts_E, prob_R, RowMap(source_R, slots_TK))

    def combine(self, y_RH: Tensor, sent: Dispatched) -> Tensor:
        """Add up each token's rows."""
        return combine_rows(y_RH, sent.rows) if sent.rows is not None else y_RH


def combine_rows(y_RH: Tensor, rows: RowMap) -> Tensor:
    """Add up the rows of each token, in float32 and always in the same order.

    Nothing but the row numbers is kept for backward, where each row gets its token's gradient.
    """
    return _Combine.apply(y_RH, rows.source_R, rows.slots_TK)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RH: Tensor, source_R: Tensor, slots_TK: Tensor) -> Tensor:
        save_for_backward(ctx, source_R)
        return kernels.unpermute(y_RH, slots_TK)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (dy_TH,) = grads
        (source_R,) = saved_values(ctx)
        return kernels.permute(dy_TH, source_R), None, None
