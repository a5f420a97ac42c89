"""One number for each copy of a token, put where the copy's row is, and back.

``slots_TK[t, k]`` is the row of token ``t``'s ``k``-th copy, as ``sort_by_expert`` gives it: a
permutation of as many rows as there are copies.  The rows that there is room for may be fewer, and
then the last are cut off, or more.

Letters: T tokens, K experts a token, R rows there is room for.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from backstash.errors import ShapeError


def weights_to_rows(weight_TK: Tensor, slots_TK: Tensor, rows: int) -> Tensor:
    """The weight of each row ``(R,)``, zero for a row of no copy.

    Raises:
        ShapeError: there is not one slot for each weight.
    """
    check_weights(weight_TK, slots_TK)
    # Each row is written once: the slots are a permutation.
    weight_R = torch.empty_like(weight_TK).flatten()
    weight_R.scatter_(0, slots_TK.flatten(), weight_TK.flatten())
    return F.pad(weight_R, (0, rows - weight_R.shape[0]))


def weights_to_copies(weight_R: Tensor, slots_TK: Tensor, valid: Tensor | None = None) -> Tensor:
    """The weight of each copy ``(T, K)``, zero for a copy without a row.

    Args:
        weight_R: A weight for each row there is room for.
        slots_TK: The row of each copy.
        valid: Integer ``(1,)`` on the device: rows from here on are not there, whatever lies in
            them.

    Raises:
        ShapeError: the weights have more than one dimension.
    """
    check_rows(weight_R, slots_TK)
    rows = weight_R.shape[0]
    is_missing_TK = slots_TK >= (rows if valid is None else valid.clamp(max=rows))
    if rows == 0:
        return weight_R.new_zeros(slots_TK.shape)
    slot_R = slots_TK.masked_fill(is_missing_TK, 0).flatten()
    weight_TK = weight_R.index_select(0, slot_R).view(slots_TK.shape)
    # Chosen, not multiplied with zero: what is not there may be NaN.
    return weight_TK.masked_fill(is_missing_TK, 0)


def check_weights(weight_TK: Tensor, slots_TK: Tensor) -> None:
    """Refuse weights without a row each."""
    if weight_TK.ndim != 2 or weight_TK.shape != slots_TK.shape:
        raise ShapeError(
            f"weights_to_rows needs weights and slots (T, K), got {tuple(weight_TK.shape)} and "
            f"{tuple(slots_TK.shape)}; pass what sort_by_expert returned for these choices"
        )


def check_rows(weight_R: Tensor, slots_TK: Tensor) -> None:
    """Refuse what is not one weight for each row."""
    if weight_R.ndim != 1 or slots_TK.ndim != 2:
        raise ShapeError(
            f"weights_to_copies needs weights (R,) and slots (T, K), got {tuple(weight_R.shape)} "
            f"and {tuple(slots_TK.shape)}; pass what sort_by_expert returned"
        )
