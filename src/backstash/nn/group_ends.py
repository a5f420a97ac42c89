"""From rows per group, however the caller has them, to running ends on the device.

Counts that live where the rows live are the router's own and are never read on the host:
what does not fit in the buffer is cut off at its end, because a captured step has no other
way to go on.  Counts that came from the host were known before the call, so too many is a
mistake and is refused.

Letters: T rows of the buffer, G groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from backstash import kernels
from backstash.errors import DtypeError, ShapeError
from backstash.tensors.grouped import counts_to_ends


@dataclasses.dataclass(frozen=True, eq=False)
class AddedUp:
    """Counts that a dispatcher has added up already: int32 ends, none past its ``rows``."""

    ends_G: Tensor
    rows: int


Counts = Sequence[int] | Tensor | AddedUp


def group_ends(m_splits: Counts, num_groups: int, rows: int, device: torch.device) -> Tensor:
    """Give int32 ``ends_G`` on ``device``, each at most ``rows``.

    Raises:
        DtypeError: ``m_splits`` are not integers.
        ShapeError: there is not one count for each group; or, where the host can see
            them, one is negative, or a list adds up to more than ``rows``.
    """
    if isinstance(m_splits, AddedUp):
        came = m_splits.ends_G.shape[0], m_splits.rows
        if came != (num_groups, rows):
            raise ShapeError(
                f"m_splits were added up for {came[0]} groups in {came[1]} rows, and there are "
                f"{num_groups} groups in {rows}; pass what belongs to these rows"
            )
        return m_splits.ends_G
    if not isinstance(m_splits, (Sequence, Tensor)) or isinstance(m_splits, str):
        raise DtypeError(
            "m_splits must be a list or an integer tensor with the rows of each group, got "
            f"{type(m_splits).__name__}; pass for instance [3, 0, 5] or a router's counts"
        )
    if (isinstance(m_splits, Tensor) and m_splits.ndim != 1) or len(m_splits) != num_groups:
        came = tuple(m_splits.shape) if isinstance(m_splits, Tensor) else (len(m_splits),)
        raise ShapeError(
            f"m_splits must have one count for each of {num_groups} groups, got shape {came}; "
            "give an empty group a zero"
        )
    if isinstance(m_splits, Tensor) and _is_fitted_there(m_splits, device):
        return kernels.fit_groups(m_splits, rows).ends_G
    came_from_host = not isinstance(m_splits, Tensor) or m_splits.device != device
    ends_G = counts_to_ends(m_splits, device)
    if came_from_host:
        total = int(m_splits.sum()) if isinstance(m_splits, Tensor) else sum(m_splits)
        if total > rows:
            raise ShapeError(
                f"m_splits add up to {total} rows and the input has only {rows}; give each "
                "group at most the rows that are there"
            )
    return ends_G.clamp(0, rows).to(torch.int32)


def _is_fitted_there(counts_G: Tensor, device: torch.device) -> bool:
    """Are these counts that only their device reads, in numbers that a kernel takes?"""
    is_there = counts_G.is_cuda and counts_G.device == device
    return is_there and counts_G.dtype in (torch.int32, torch.int64)
