"""Rows of tokens to rows of experts, and back.

Each of T tokens is sent to K experts, which makes R = T * K rows.  Experts want their
rows together, so the rows are sorted by expert.  Two index arrays describe the sort,
one for each direction: ``source_R[r]`` is the token that row ``r`` copies, and
``slots_TK[t, k]`` is the row that holds token ``t``'s ``k``-th copy.  With both at hand
each direction, and the gradient of each, is a gather: nothing is added with atomics, so
every result is the same each time.

Letters: T tokens, K experts a token, R rows, H features, E experts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from backstash.errors import DtypeError, ShapeError
from backstash.kernels.reference.routing import Tally


def sort_by_expert(
    expert_TK: Tensor,
    num_experts: int,
    first: int = 0,
    tally: Tally | None = None,
    rows: int | None = None,
    *,
    ends_E: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the copies of the tokens by expert, keeping the order of ``(t, k)`` inside one.

    Args:
        expert_TK: The experts of each token.
        num_experts: How many experts there are.
        first: The number of the first of them.  An expert before it, or after the last, is
            nobody: its rows come last and are counted nowhere, so they are the tail that a
            grouped matmul turns into zeros.
        tally: What ``count_experts`` gave of all experts, these and others; one of other choices
            is of no use here, and not looked at.
        rows: How many rows ``source_R`` has; None for one a copy.  Copies past them are cut off,
            and rows that are no copy's name token 0.
        ends_E: Int32 ``(E,)``, if given filled with where the rows of each expert end.

    Returns:
        ``source_R`` int64, ``slots_TK`` int64 and ``counts_E`` int32.

    Raises:
        ShapeError: ``expert_TK`` is not two-dimensional.
        DtypeError: ``expert_TK`` is not int32 or int64.
    """
    if expert_TK.ndim != 2:
        raise ShapeError(
            f"sort_by_expert needs (T, K), got {tuple(expert_TK.shape)}; "
            "give each token a row of expert numbers"
        )
    if expert_TK.dtype not in (torch.int32, torch.int64):
        raise DtypeError(
            f"sort_by_expert needs expert numbers in int32 or int64, got {expert_TK.dtype}; "
            "cast them with .long()"
        )
    expert_R = (expert_TK - first if first else expert_TK).reshape(-1)
    is_nobody_R = (expert_R < 0) | (expert_R >= num_experts)
    sorted_R, order_R = torch.sort(expert_R.masked_fill(is_nobody_R, num_experts), stable=True)
    row_R = torch.arange(order_R.shape[0], device=order_R.device)
    slots_R = torch.empty_like(order_R).scatter_(0, order_R, row_R)
    source_R = order_R.div(max(expert_TK.shape[1], 1), rounding_mode="floor")
    expert_E = torch.arange(num_experts, device=expert_R.device, dtype=expert_R.dtype)
    # The rows are sorted, so an expert's end is found by bisection: no atomics, no host read.
    found_E = torch.searchsorted(sorted_R, expert_E, right=True, out_int32=True)
    if ends_E is not None:
        ends_E.copy_(found_E)
    counts_E = torch.diff(found_E, prepend=found_E.new_zeros(1))
    missing = 0 if rows is None else rows - source_R.shape[0]
    return F.pad(source_R, (0, missing)), slots_R.view(expert_TK.shape), counts_E


def permute(x_TH: Tensor, source_R: Tensor) -> Tensor:
    """Copy each row's token to it: ``x_RH[r] = x_TH[source_R[r]]``.

    Raises:
        ShapeError: ``x_TH`` is not two-dimensional or ``source_R`` not one-dimensional.
    """
    check_permute(x_TH, source_R)
    return x_TH.index_select(0, source_R)


def unpermute(
    y_RH: Tensor, slots_TK: Tensor, valid: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Add up the rows of each token: ``y_TH[t] = sum_k y_RH[slots_TK[t, k]]``.

    The sum runs over ascending ``k`` in float32 (float64 for float64), so it is the
    same whatever expert each copy went to.

    Args:
        y_RH: The rows.
        slots_TK: The row of each copy.
        valid: Integer ``(1,)`` on the device: rows from here on are not there, whatever lies
            in them, and slots may name more rows than the buffer has.  Such a copy adds
            nothing.
        out: Where the sums are written, columns of a larger matrix for instance.

    Raises:
        ShapeError: ``y_RH`` or ``slots_TK`` is not two-dimensional.
    """
    check_unpermute(y_RH, slots_TK, out)
    wide = torch.float64 if y_RH.dtype is torch.float64 else torch.float32
    y_TH = y_RH.new_zeros(slots_TK.shape[0], y_RH.shape[1], dtype=wide)
    is_empty = valid is not None and y_RH.shape[0] == 0
    for slots_T in () if is_empty else slots_TK.unbind(1):
        if valid is None:
            y_TH += y_RH.index_select(0, slots_T)
            continue
        is_there_T = slots_T < valid.clamp(max=y_RH.shape[0])
        # Chosen, not multiplied with zero: what is not there may be NaN.
        rows_TH = y_RH.index_select(0, slots_T.where(is_there_T, 0))
        y_TH += rows_TH.where(is_there_T.unsqueeze(1), 0)
    return y_TH.to(y_RH.dtype) if out is None else out.copy_(y_TH)


def check_permute(x_TH: Tensor, source_R: Tensor) -> None:
    """Refuse what are not rows and their sources."""
    if x_TH.ndim != 2 or source_R.ndim != 1:
        raise ShapeError(
            f"permute needs tokens (T, H) and sources (R,), got {tuple(x_TH.shape)} and "
            f"{tuple(source_R.shape)}; flatten the leading dimensions"
        )


def check_unpermute(y_RH: Tensor, slots_TK: Tensor, out: Tensor | None) -> None:
    """Refuse what are not rows, each token's slots, and room for the tokens' sums."""
    if y_RH.ndim != 2 or slots_TK.ndim != 2:
        raise ShapeError(
            f"unpermute needs rows (R, H) and slots (T, K), got {tuple(y_RH.shape)} and "
            f"{tuple(slots_TK.shape)}; pass what sort_by_expert returned"
        )
    if out is not None and tuple(out.shape) != (slots_TK.shape[0], y_RH.shape[1]):
        raise ShapeError(
            f"unpermute needs room for {slots_TK.shape[0]} tokens of {y_RH.shape[1]} features, "
            f"got {tuple(out.shape)}; pass a view of that shape"
        )
