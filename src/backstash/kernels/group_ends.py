"""Running ends that fit a buffer, in one launch: the twin of the reference.

The groups of a layer are few, so one program adds them all up; a dozen small operations of torch
would take longer to launch than the layer's first matmul takes.

Letters: G groups.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.launches import Launcher
from backstash.kernels.reference.group_ends import Fitted, check_counts
from backstash.kernels.sizes import next_power_of_2


@triton.jit
def _fit_kernel(p_counts, p_ends, p_left, p_overflow, groups, rows, BG: tl.constexpr):
    i_group = tl.arange(0, BG)
    m_group = i_group < groups
    count = tl.load(p_counts + i_group, mask=m_group, other=0).to(tl.int64)
    asked = tl.cumsum(count, 0)
    end = tl.minimum(tl.maximum(asked, 0), rows)
    before = tl.minimum(tl.maximum(asked - count, 0), rows)
    tl.store(p_ends + i_group, end.to(tl.int32), mask=m_group)
    tl.store(p_left + i_group, (end - before).to(tl.int32), mask=m_group)
    # Past the last group nothing is added, so the last lane has the sum of all.
    tl.store(p_overflow, tl.sum(count, 0) > rows)


_fit = Launcher(_fit_kernel)


def fit_groups(counts_G: Tensor, rows: int) -> Fitted:
    """Cut the groups off at ``rows``, the last groups' rows first."""
    check_counts(counts_G)
    counts_G, groups, device = counts_G.contiguous(), counts_G.shape[0], counts_G.device
    # The ends are kept for backward, and so have memory of their own.
    ends_G = torch.empty(groups, dtype=torch.int32, device=device)
    left_G = torch.empty(groups, dtype=torch.int32, device=device)
    overflow = torch.empty(1, dtype=torch.bool, device=device)
    tile: dict[str, Any] = {"BG": next_power_of_2(groups)}
    _fit(1, counts_G, ends_G, left_G, overflow, groups, rows, **tile)
    return Fitted(ends_G, left_G, overflow)
