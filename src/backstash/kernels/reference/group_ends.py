"""From the rows of each group to running ends that no buffer is too small for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from backstash.errors import DtypeError, ShapeError


class Fitted(NamedTuple):
    """What of the groups fits into a buffer: the rest is cut off at its end.

    Attributes:
        ends_G: int32, the running sum of the rows, none past the buffer.
        counts_G: int32, the rows of each group that are left.
        overflow: bool ``(1,)``: was anything cut off?
    """

    ends_G: Tensor
    counts_G: Tensor
    overflow: Tensor


def fit_groups(counts_G: Tensor, rows: int) -> Fitted:
    """Cut the groups off at ``rows``, the last groups' rows first.

    Raises:
        ShapeError: ``counts_G`` is not one number for each of at least one group.
        DtypeError: they are not int32 or int64.
    """
    check_counts(counts_G)
    ends_G = counts_G.cumsum(0)
    fitting_G = ends_G.clamp(0, rows).int()
    counts_G = fitting_G.diff(prepend=fitting_G.new_zeros(1))
    return Fitted(fitting_G, counts_G, ends_G[-1:] > rows)


def check_counts(counts_G: Tensor) -> None:
    """Refuse what is not a number of rows for each group."""
    if counts_G.ndim != 1 or not counts_G.shape[0]:
        raise ShapeError(
            f"fit_groups needs counts (G,) of at least one group, got {tuple(counts_G.shape)}; "
            "flatten them"
        )
    if counts_G.dtype not in (torch.int32, torch.int64):
        raise DtypeError(
            f"fit_groups needs counts in int32 or int64, got {counts_G.dtype}; cast them with "
            ".int()"
        )
