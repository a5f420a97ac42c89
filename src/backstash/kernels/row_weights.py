"""Weights of copies to their rows and back on a GPU, in one launch each.

The twins of ``backstash.kernels.reference.row_weights``: numbers are moved and none is changed.

Letters: T tokens, K experts a token, R rows there is room for.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.launches import Launcher
from backstash.kernels.reference.row_weights import check_rows, check_weights
from backstash.kernels.sizes import ceil_div

_BLOCK = 1024


@triton.jit
def _to_rows_kernel(p_weight, p_slots, p_row, copies, rows, B: tl.constexpr):
    i_copy = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    m_copy = i_copy < copies
    slot = tl.load(p_slots + i_copy, mask=m_copy, other=0).to(tl.int64)
    weight = tl.load(p_weight + i_copy, mask=m_copy, other=0)
    tl.store(p_row + slot, weight, mask=m_copy & (slot < rows))
    # A row after the last copy's has none.
    zero = tl.zeros([B], p_row.dtype.element_ty)
    tl.store(p_row + i_copy, zero, mask=(i_copy >= copies) & (i_copy < rows))


@triton.jit
def _to_copies_kernel(p_row, p_slots, p_valid, p_weight, copies, rows, B: tl.constexpr):
    i_copy = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    m_copy = i_copy < copies
    slot = tl.load(p_slots + i_copy, mask=m_copy, other=0).to(tl.int64)
    m_row = m_copy & (slot < rows)
    if p_valid is not None:
        m_row = m_row & (slot < tl.load(p_valid))
    tl.store(p_weight + i_copy, tl.load(p_row + slot, mask=m_row, other=0), mask=m_copy)


_to_rows = Launcher(_to_rows_kernel)
_to_copies = Launcher(_to_copies_kernel)


def weights_to_rows(weight_TK: Tensor, slots_TK: Tensor, rows: int) -> Tensor:
    """The weight of each row ``(R,)``, zero for a row of no copy."""
    check_weights(weight_TK, slots_TK)
    weight_R = torch.empty(rows, dtype=weight_TK.dtype, device=weight_TK.device)
    copies, tile = weight_TK.numel(), _tile()
    if programs := ceil_div(max(copies, rows), _BLOCK):
        weight_TK, slots_TK = weight_TK.contiguous(), slots_TK.contiguous()
        _to_rows(programs, weight_TK, slots_TK, weight_R, copies, rows, **tile)
    return weight_R


def weights_to_copies(weight_R: Tensor, slots_TK: Tensor, valid: Tensor | None = None) -> Tensor:
    """The weight of each copy ``(T, K)``, zero for a copy without a row."""
    check_rows(weight_R, slots_TK)
    weight_TK = torch.empty(slots_TK.shape, dtype=weight_R.dtype, device=weight_R.device)
    copies, rows = slots_TK.numel(), weight_R.shape[0]
    if programs := ceil_div(copies, _BLOCK):
        weight_R, slots_TK = weight_R.contiguous(), slots_TK.contiguous()
        _to_copies(programs, weight_R, slots_TK, valid, weight_TK, copies, rows, **_tile())
    return weight_TK


def _tile() -> dict[str, Any]:
    return {"B": _BLOCK}
