"""Losses that keep a router in order, and how they join the training loss.

* The *balance loss* is smallest when every expert has the same share of the tokens:
  ``E * sum_e f_e * P_e`` with ``f`` the share of rows that went to an expert (integers, no
  gradient) and ``P`` the mean share of its score.  It is 1 for an even load.
* The *z loss* is the mean over tokens of ``logsumexp(logits)**2``: it keeps logits small
  enough for their rounding not to matter.

Both are means over tokens.  With a process group they are means over the tokens of all its
ranks, so that the loss does not depend on how the batch is cut.  Their value is then the
same on each rank, and their gradient is right for a training that *averages* gradients over
the ranks, as DistributedDataParallel and ``fully_shard`` do.

A router sits deep in a model, far from where its loss could be added to the total.
:func:`attach_loss` lets an activation pass unchanged and adds the loss's gradient on the way
back, which is what adding the loss to the total would do.

Letters: T tokens, E experts, K experts a token.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from backstash.recompute import remember


@dataclasses.dataclass(frozen=True)
class Losses:
    """The losses of one routing, each one number, before its weight; ``None`` where unused."""

    balance: Tensor | None = None
    z: Tensor | None = None

    def detach(self) -> Losses:
        """The same values without the graph that made them."""
        parts = (self.balance, self.z)
        return Losses(*(None if part is None else part.detach() for part in parts))


def balance_loss(
    share_TE: Tensor, counts_E: Tensor, top_k: int, group: dist.ProcessGroup | None
) -> Tensor:
    """``E * sum_e f_e * P_e`` for the loads ``counts_E``, which are those of all ranks.

    Source: Fedus et al., "Switch Transformers", 2021, eq. 4, for more than one expert a token.
    """
    tokens, rows = _tokens(counts_E, top_k, share_TE.dtype)
    mean_E = _averaged(share_TE.sum(0), group) / tokens
    return counts_E.numel() * (counts_E / rows * mean_E).sum()


def z_loss(
    logits_TE: Tensor, counts_E: Tensor, top_k: int, group: dist.ProcessGroup | None
) -> Tensor:
    """The mean square of the logits' logsumexp.

    Source: Zoph et al., "ST-MoE", 2022, eq. 5.
    """
    tokens, _ = _tokens(counts_E, top_k, logits_TE.dtype)
    return _averaged(logits_TE.logsumexp(1).square().sum(), group) / tokens


def sum_over_ranks(local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum over the group's ranks, in a tensor of its own; every rank must call it."""
    total = local.clone()
    if group is not None:
        dist.all_reduce(total, group=group)
    return total


def attach_loss(y: Tensor, loss: Tensor) -> Tensor:
    """Give ``y`` back, and add ``loss`` to whatever is differentiated through it."""
    return _AttachLoss.apply(y, loss)


def _tokens(counts_E: Tensor, top_k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers of tokens and of rows; one where there are none, so that 0/0 is 0."""
    rows = counts_E.sum().clamp(min=1)
    return (rows / top_k).to(dtype), rows.to(dtype)


def _averaged(local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum over ranks, whose gradients are right after averaging them over the ranks."""
    if group is None:
        return local
    # Remembered: a recomputation must not enter a collective, since other ranks may not.
    total = remember(lambda: sum_over_ranks(local.detach(), group))
    return total + dist.get_world_size(group) * (local - local.detach())


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor) -> Tensor:
        ctx.plan = loss.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (dy,) = grads
        return dy, dy.new_ones((), dtype=ctx.plan)
