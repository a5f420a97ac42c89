"""Float8 columns of experts' weights, turned, on a GPU: all of it in one launch.

All experts have as many rows, so a program takes a strip of columns of one of them: it finds the
largest magnitudes of the strip's columns, and reads the strip again for its codes, from its end.
No program needs what another one finds, so nothing is prepared before or launched in between.

Letters: G experts, N rows and K columns of each.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.cast.scales import scale_of, scaling_of
from backstash.kernels.launches import Launcher
from backstash.kernels.sizes import ceil_div

# Rows of a step and columns of a strip.
_TILE: dict[str, Any] = {"B": 128, "BK": 128, "num_warps": 16}


@triton.jit
def _weight_kernel(
    p_w,
    p_codes,
    p_scale,
    p_scale_inv,
    N,
    K,
    largest,
    epsilon,
    value_for_inf,
    exact,
    B: tl.constexpr,
    BK: tl.constexpr,
):
    chunks = tl.cdiv(K, BK)
    group = (tl.program_id(0) // chunks).to(tl.int64)
    i_column = tl.program_id(0) % chunks * BK + tl.arange(0, BK)
    m_column = i_column < K
    p_strip = p_w + group * N * K + i_column[None, :]
    o_scale = group * K + i_column
    p_to = p_codes + o_scale[:, None] * N
    i_step = tl.arange(0, B)
    magnitude = tl.zeros([B, BK], tl.float32)
    for first in range(0, N, B):
        i_row = first + i_step
        mask = (i_row < N)[:, None] & m_column[None, :]
        w = tl.load(p_strip + i_row[:, None] * K, mask=mask, other=0)
        # The maximum with a NaN is the other operand: a NaN does not count.
        magnitude = tl.maximum(magnitude, tl.abs(w.to(tl.float32)))
    amax = tl.maximum(tl.max(magnitude, 0), 0.0)
    scale, inverse = scale_of(amax, largest, epsilon, value_for_inf, exact)
    tl.store(p_scale_inv + o_scale, inverse, mask=m_column)
    # Each thread needs the scales of other columns now than it has found: they are read again.
    tl.store(p_scale + o_scale, scale, mask=m_column)
    tl.debug_barrier()
    # From the end: what was read last is still in the cache.
    for last in range(tl.cdiv(N, B), 0, -1):
        i_row = (last - 1) * B + i_step
        mask = (i_row < N)[:, None] & m_column[None, :]
        w = tl.load(p_strip + i_row[:, None] * K, mask=mask, other=0, eviction_policy="evict_first")
        scale = tl.load(p_scale + o_scale, mask=m_column, other=0)
        codes = (w.to(tl.float32) * scale[None, :]).to(p_codes.dtype.element_ty)
        tl.store(p_to + i_row[None, :], tl.trans(codes), mask=tl.trans(mask))


_turn = Launcher(_weight_kernel)


def quantize_float8_weight(
    w_GNK: Tensor, code_dtype: torch.dtype, *, epsilon: float = 0.0, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """Codes ``(G, K, N)`` and inverse scales ``(G, K)`` of each expert's columns."""
    w_GNK = w_GNK.contiguous()
    G, N, K = w_GNK.shape
    new: dict[str, Any] = {"device": w_GNK.device}
    codes_GKN = torch.empty(G, K, N, dtype=code_dtype, **new)
    scale_GK, scale_inv_GK = torch.empty(2, G, K, dtype=torch.float32, **new)
    programs = G * ceil_div(K, _TILE["BK"])
    if programs:
        scaling = scaling_of(code_dtype, epsilon, power_of_two=power_of_two)
        _turn(programs, w_GNK, codes_GKN, scale_GK, scale_inv_GK, N, K, *scaling, **_TILE)
    return codes_GKN, scale_inv_GK
