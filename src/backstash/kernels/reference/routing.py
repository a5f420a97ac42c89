"""Which experts a token goes to and with what weight, from the scores of a router.

Choosing is a sort of each token's few hundred scores, of which the first K are kept; among
equals the expert with the lowest number comes first, so the choice is the same everywhere.

The weights of the chosen are the softmax over their logits.  That is what the softmax over all
experts gives when the weights of the chosen are divided by their sum, but nothing of the others
is needed for it: not for the value, and not for the gradient, which is

    dlogit_k = prob_k * (dprob_k - sum_j dprob_j prob_j)    and zero for all others.

Letters: T tokens, E experts, K experts a token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from backstash.errors import DtypeError, ShapeError


def top_experts(scores_TE: Tensor, bias_E: Tensor | None, top_k: int) -> Tensor:
    """The experts with the largest ``scores + bias``, best first: ``(T, K)`` int64.

    Without a bias, those with the largest scores.  Among equals the lowest number wins; NaN is
    larger than any number.

    Raises:
        ShapeError: ``scores_TE`` is not two-dimensional, or there are fewer than ``top_k``.
    """
    check_top(scores_TE, top_k)
    # topk leaves the order of equals open, a stable sort does not.  The copy lets go of the
    # indices of all the others.
    biased_TE = scores_TE if bias_E is None else scores_TE + bias_E
    order_TE = biased_TE.sort(dim=1, descending=True, stable=True).indices
    return order_TE[:, :top_k].contiguous()


class Tally(NamedTuple):
    """Choices that are counted, which is half of sorting rows by them.

    Attributes:
        expert_TK: The choices.
        counts_E: int32, how many rows go to each expert.
        before_SB: int32, how many go to each in the blocks of rows before each block; None where
            sorting does not go by blocks.
    """

    expert_TK: Tensor
    counts_E: Tensor
    before_SB: Tensor | None


def count_experts(expert_TK: Tensor, num_experts: int) -> Tally:
    """Count the rows that go to each expert; numbers outside are counted nowhere.

    Raises:
        ShapeError: ``expert_TK`` is not two-dimensional.
        DtypeError: ``expert_TK`` is not int32 or int64.
    """
    check_experts("count_experts", expert_TK)
    counts_E = torch.zeros(num_experts + 1, dtype=torch.int32, device=expert_TK.device)
    is_nobody_TK = (expert_TK < 0) | (expert_TK >= num_experts)
    expert_R = expert_TK.masked_fill(is_nobody_TK, num_experts).flatten().long()
    # Integers may be added in any order, and nothing is read on the host, unlike bincount.
    counts_E.scatter_add_(0, expert_R, torch.ones_like(expert_R, dtype=torch.int32))
    return Tally(expert_TK, counts_E[:-1], None)


def weigh_experts(logits_TE: Tensor, expert_TK: Tensor) -> Tensor:
    """The weights of the chosen: the softmax over their logits, ``(T, K)``.

    Raises:
        ShapeError: the two are not two-dimensional with as many rows.
    """
    check_weigh(logits_TE, expert_TK)
    return logits_TE.gather(1, expert_TK.long()).softmax(1)


def weigh_experts_backward(
    dprob_TK: Tensor, prob_TK: Tensor, expert_TK: Tensor, num_experts: int
) -> Tensor:
    """The gradient of :func:`weigh_experts`' logits, ``(T, E)`` in ``prob_TK``'s dtype."""
    dlogit_TK = prob_TK * (dprob_TK - (dprob_TK * prob_TK).sum(1, keepdim=True))
    dlogits_TE = prob_TK.new_zeros(prob_TK.shape[0], num_experts)
    return dlogits_TE.scatter_add_(1, expert_TK.long(), dlogit_TK)


def bfloat16_parts(x_TE: Tensor) -> Tensor:
    """Three bfloat16 side by side, ``(T, 3 E)``, that add up to a float32 almost exactly.

    Each is the nearest to what those before it have left, so together they have 24 bits.

    Raises:
        ShapeError: ``x_TE`` is not two-dimensional.
        DtypeError: ``x_TE`` is not float32.
    """
    check_parts(x_TE)
    parts, rest_TE = [], x_TE
    for _ in range(3):
        parts.append(rest_TE.bfloat16())
        rest_TE = rest_TE - parts[-1]
    return torch.cat(parts, 1)


def check_top(scores_TE: Tensor, top_k: int) -> None:
    """Refuse what are not scores of at least ``top_k`` experts."""
    if scores_TE.ndim != 2 or not 0 <= top_k <= scores_TE.shape[1]:
        raise ShapeError(
            f"top_experts needs scores (T, E) of at least {top_k} experts, got "
            f"{tuple(scores_TE.shape)}; give each token a row with one score an expert"
        )


def check_experts(kernel: str, expert_TK: Tensor) -> None:
    """Refuse what are not numbers of experts, one row a token."""
    if expert_TK.ndim != 2:
        raise ShapeError(
            f"{kernel} needs (T, K), got {tuple(expert_TK.shape)}; "
            "give each token a row of expert numbers"
        )
    if expert_TK.dtype not in (torch.int32, torch.int64):
        raise DtypeError(
            f"{kernel} needs expert numbers in int32 or int64, got {expert_TK.dtype}; "
            "cast them with .long()"
        )


def check_weigh(logits_TE: Tensor, expert_TK: Tensor) -> None:
    """Refuse logits and choices that are not of the same tokens."""
    if logits_TE.ndim != 2 or expert_TK.ndim != 2 or len(logits_TE) != len(expert_TK):
        raise ShapeError(
            f"weigh_experts needs logits (T, E) and choices (T, K), got {tuple(logits_TE.shape)} "
            f"and {tuple(expert_TK.shape)}; give both a row for each token"
        )


def check_parts(x_TE: Tensor) -> None:
    """Refuse what is no matrix of float32."""
    if x_TE.ndim != 2:
        raise ShapeError(
            f"bfloat16_parts needs (T, E), got {tuple(x_TE.shape)}; flatten the leading dimensions"
        )
    if x_TE.dtype is not torch.float32:
        raise DtypeError(f"bfloat16_parts needs float32, got {x_TE.dtype}; cast with .float()")
