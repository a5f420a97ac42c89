"""Getting rows to their experts, and the results back to their tokens.

A dispatcher is two functions around the experts.  ``dispatch`` says which rows they get,
``combine`` adds up what they return.  :class:`Local` keeps every row where it is; other
dispatchers send rows to the ranks that hold the experts, and plug in at the same place.

With plain :class:`Local` the tokens are not even copied here: the experts are given the
tokens as they are and the row map, gather while they multiply, and add up what they return.  So
the tokens are saved once for backward, not once per expert they go to, and nothing is left to
combine.

A rank of an expert-parallel group cannot do that: its rows come from elsewhere, into buffers
that are sized before anybody knows how many there will be.  ``Local(capacity_factor=...,
keep_experts=...)`` gives a layer on one process the buffers and counts of one such rank.

Letters: T tokens, K experts a token, R rows (T * K, or the capacity of the buffers), H
features, E experts, G experts of this rank.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from backstash import kernels
from backstash.errors import ConfigError
from backstash.moe.router import Routing
from backstash.nn import RowMap
from backstash.nn.group_ends import AddedUp
from backstash.nn.options import check_numbers
from backstash.opaque import opaque
from backstash.saving import (
    differentiable_once,
    mark_grouped_tensor,
    save_for_backward,
    saved_values,
)


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Room for more rows than there may be: where they came from, and how many are there."""

    rows: RowMap
    """``source_R`` for each row of the buffer; ``slots_TK`` may name rows that are not there."""
    valid: Tensor
    """int32 ``(1,)``: the rows that are there; the others hold anything."""
    overflow: Tensor
    """bool ``(1,)``: were rows dropped, because more came than fit?"""


@dataclasses.dataclass(frozen=True)
class Dispatched:
    """What the experts of this rank work on."""

    x: Tensor
    """Rows in the experts' order, or, with ``rows``, the tokens that they are copies of."""
    counts_E: Tensor
    """int32: rows of each expert of this rank, on the device."""
    prob_R: Tensor
    """Weight of each row, in the experts' order."""
    rows: RowMap | None
    """How rows and tokens correspond, for experts that gather, or fill their buffer, themselves;
    ``None`` if ``x`` is rows already."""
    buffer: Buffer | None = None
    """What is known of the experts' rows where they are in a buffer that may be partly empty."""
    added_up: AddedUp | None = None
    """The counts as running ends, from a dispatcher that has them."""

    @property
    def is_combined_inside(self) -> bool:
        """Do the experts add up what belongs to a token?  They do where they gather tokens."""
        return self.rows is not None and self.buffer is None

    @property
    def splits_E(self) -> Tensor | AddedUp:
        """What the experts are told of their rows."""
        return self.counts_E if self.added_up is None else self.added_up

    @property
    def overflow(self) -> Tensor | None:
        """bool ``(1,)`` on the device: were rows dropped?  ``None`` where none ever are."""
        return None if self.buffer is None else self.buffer.overflow


class Dispatcher(Protocol):
    """The two functions around the experts."""

    def local_experts(self, num_experts: int) -> int:
        """How many of the layer's experts are on this rank: it has weights for so many."""
        ...

    def dispatch(self, x_TH: Tensor, routing: Routing) -> Dispatched:
        """Say which rows the experts of this rank get."""
        ...

    def combine(self, y: Tensor, sent: Dispatched) -> Tensor:
        """Add up the experts' rows into ``(T, H)``, the tokens' order.

        Where :attr:`Dispatched.is_combined_inside` the experts have done that, and ``y`` is
        ``(T, H)`` already.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local:
    """Rows are sorted by expert and none is sent anywhere.

    With no options every expert is here and no row is dropped.  With either, this is one rank
    of an expert-parallel group, for benchmarks and tests: it has the experts it keeps, and
    real rows of static capacity ``ceil(capacity_factor * T * K * G / E)``, or ``T * K``
    without a factor.  Only as many rows as the router sent are there, the rest of the buffer
    is room; rows over the capacity are dropped, the last experts' first, and
    :attr:`Dispatched.overflow` says so.  No shape depends on the routing.  A token that no
    kept expert saw gets zeros, and nothing flows back through a row that is not there.

    Raises:
        ConfigError: an option means nothing.
    """

    capacity_factor: float | None = None
    """Rows there is room for, divided by the rows of an even load."""
    keep_experts: Sequence[int] | None = None
    """Numbers of this rank's experts, in the order of its weights; ``None`` for all."""

    def __post_init__(self) -> None:
        factor, keep = self.capacity_factor, self.keep_experts
        if factor is not None:
            remedy = "1 has room for the rows of an even load, None for all there can be"
            check_numbers(above=0, remedy=remedy, capacity_factor=factor)
        if keep is None:
            return
        if not _are_expert_numbers(keep):
            raise ConfigError(
                f"keep_experts must be different numbers of experts, at least one, got {keep!r}; "
                "pass for instance range(0, 8), or None to keep all"
            )
        object.__setattr__(self, "keep_experts", tuple(keep))

    def local_experts(self, num_experts: int) -> int:
        """G: the experts that are kept.

        Raises:
            ConfigError: one is kept that the layer does not have.
        """
        return len(self._kept(num_experts))

    def dispatch(self, x_TH: Tensor, routing: Routing) -> Dispatched:
        """Sort the rows by expert; without options the tokens themselves stay as they are."""
        if self.capacity_factor is not None or self.keep_experts is not None:
            return self._fill_buffer(x_TH, routing)
        num_experts = routing.counts_E.shape[0]
        expert_TK, tally = routing.expert_TK, routing.tally
        # The ends are kept for backward, and so have memory of their own.
        ends_E = expert_TK.new_empty(num_experts, dtype=torch.int32)
        source_R, slots_TK, counts_E = kernels.sort_by_expert(
            expert_TK, num_experts, tally=tally, ends_E=ends_E
        )
        rows, added_up = RowMap(source_R, slots_TK), AddedUp(ends_E, source_R.shape[0])
        prob_R = rows.weights(routing.prob_TK)
        return Dispatched(x_TH, counts_E, prob_R, rows, added_up=added_up)

    def combine(self, y: Tensor, sent: Dispatched) -> Tensor:
        """Add up each token's rows, if the experts have not."""
        if sent.buffer is None:
            return y
        return combine_rows(y, sent.buffer.rows, sent.buffer.valid)

    # torch.compile cannot trace marks, which belong to storages.
    @opaque(reason="the buffers of a rank are marked with their valid length")
    def _fill_buffer(self, x_TH: Tensor, routing: Routing) -> Dispatched:
        keep = self._kept(routing.counts_E.shape[0])
        capacity = self._capacity_rows(routing, len(keep))
        # Rows that are not there are of token 0: they have to be gathered from somewhere.
        source_R, slots_TK, counts_G = _sort(routing, keep, capacity)
        fitted = kernels.fit_groups(counts_G, capacity)
        valid = fitted.ends_G[-1:]
        rows = RowMap(source_R, slots_TK, valid)
        prob_R = rows.weights(routing.prob_TK)
        mark_grouped_tensor(prob_R, valid)
        buffer, added_up = Buffer(rows, valid, fitted.overflow), AddedUp(fitted.ends_G, capacity)
        return Dispatched(x_TH, fitted.counts_G, prob_R, rows, buffer, added_up)

    def _capacity_rows(self, routing: Routing, kept: int) -> int:
        rows = routing.expert_TK.numel()
        if self.capacity_factor is None:
            return rows
        return math.ceil(self.capacity_factor * rows * kept / routing.counts_E.shape[0])

    def _kept(self, num_experts: int) -> Sequence[int]:
        keep = range(num_experts) if self.keep_experts is None else self.keep_experts
        if max(keep) >= num_experts:
            raise ConfigError(
                f"keep_experts names expert {max(keep)} of a layer with {num_experts}; experts "
                "are counted from 0"
            )
        return keep


def combine_rows(y_RH: Tensor, rows: RowMap, valid: Tensor | None = None) -> Tensor:
    """Add up the rows of each token, in float32 and always in the same order.

    Of a buffer only the first ``valid`` rows are read; a token without rows gets zeros.
    Nothing but the row numbers is kept for backward, where each row gets its token's gradient.
    """
    return _Combine.apply(y_RH, rows.source_R, rows.slots_TK, valid)


def _are_expert_numbers(keep: Any) -> bool:
    if not isinstance(keep, Sequence) or isinstance(keep, str) or len(keep) == 0:
        return False
    return all(type(e) is int and e >= 0 for e in keep) and len(set(keep)) == len(keep)


def _sort(routing: Routing, keep: Sequence[int], rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first rows by the place of their expert in ``keep``; the others' come last."""
    expert_TK, experts = routing.expert_TK, len(keep)
    if list(keep) == list(range(keep[0], keep[-1] + 1)):
        first, tally = keep[0], routing.tally
        return kernels.sort_by_expert(expert_TK, experts, first, tally, rows=rows)
    return kernels.sort_by_expert(_numbers_among(expert_TK, keep), experts, rows=rows)


def _numbers_among(expert_TK: Tensor, keep: Sequence[int]) -> Tensor:
    """The place of each expert in ``keep``; for others a number past the last, who is nobody."""
    number_TK = torch.full_like(expert_TK, len(keep))
    # Neighbours that stay neighbours move by the same amount, so a range is one step.
    for shift, run in itertools.groupby(enumerate(keep), lambda pair: pair[1] - pair[0]):
        experts = [expert for _, expert in run]
        is_in_TK = (expert_TK >= experts[0]) & (expert_TK <= experts[-1])
        number_TK = torch.where(is_in_TK, expert_TK - shift, number_TK)
    return number_TK


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y_RH: Tensor, source_R: Tensor, slots_TK: Tensor, valid: Tensor | None
    ) -> Tensor:
        save_for_backward(ctx, source_R)
        return kernels.unpermute(y_RH, slots_TK, valid)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (dy_TH,) = grads
        (source_R,) = saved_values(ctx)
        return kernels.permute(dy_TH, source_R), None, None, None
