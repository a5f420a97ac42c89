"""Grouped products of rows that are copies of tokens, on a GPU: the twins of the reference.

On a Hopper GPU 16-bit floats are read from where the tokens are, and every number of the result is
that of the products of copies.  Elsewhere, and where a token is not whole units of memory, the
copies are made first.

Letters: T tokens, R rows, K input features, N output features, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backstash.kernels.grouped_matmul import grouped_mm, grouped_mm_dw, grouped_mm_dx
from backstash.kernels.permutation import permute
from backstash.kernels.reference.gathered_mm import check_source
from backstash.kernels.reference.grouped_mm import check_grouped, check_grouped_dw

try:
    from backstash.kernels.gathered_columns import Copies, multiply_gathered_columns
    from backstash.kernels.gathered_rows import multiply_gathered_rows
    from backstash.kernels.warpgroups import DTYPES, aligned, is_aligned
except (ImportError, AttributeError):
    # Gluon is new in Triton and still changes its names.
    DTYPES = {}

_HOPPER = 9
# Triton knows of a number only whether it is whole sixteens; a block of rows has 64 columns.
_UNIT, _BLOCK = 16, 64


def gathered_mm(x_TK: Tensor, w_GNK: Tensor, ends_G: Tensor, source_R: Tensor) -> Tensor:
    """Give each row's token times the row's weight: ``y[r] = w[g(r)] @ x[source[r]]``."""
    check_source(source_R)
    if not _is_read_in_place(x_TK, source_R, _BLOCK) or not w_GNK.numel():
        return grouped_mm(permute(x_TK, source_R), w_GNK, ends_G)
    check_grouped("gathered_mm", x_TK, w_GNK, ends_G, columns_dim=2)
    return multiply_gathered_rows(x_TK, source_R, aligned(w_GNK).mT, ends_G)


def gathered_mm_dx(dy_TN: Tensor, w_GNK: Tensor, ends_G: Tensor, source_R: Tensor) -> Tensor:
    """Give the same the other way: ``dx[r] = dy[source[r]] @ w[g(r)]``."""
    check_source(source_R)
    if not _is_read_in_place(dy_TN, source_R, _BLOCK) or not w_GNK.numel():
        return grouped_mm_dx(permute(dy_TN, source_R), w_GNK, ends_G)
    check_grouped("gathered_mm_dx", dy_TN, w_GNK, ends_G, columns_dim=1)
    return multiply_gathered_rows(dy_TN, source_R, aligned(w_GNK), ends_G)


def gathered_mm_dw_of_input(
    dy_RN: Tensor, x_TK: Tensor, ends_G: Tensor, source_R: Tensor
) -> Tensor:
    """Give the gradient of a weight that multiplied copies: ``dw[g] = dy[g].T @ x[source][g]``."""
    check_source(source_R)
    if not _is_read_in_place(x_TK, source_R, _UNIT) or not (dy_RN.numel() and len(ends_G)):
        return grouped_mm_dw(dy_RN, permute(x_TK, source_R), ends_G)
    _check_dw(dy_RN, x_TK, ends_G, source_R)
    return multiply_gathered_columns(aligned(dy_RN), x_TK, source_R, ends_G, Copies.OF_INPUT)


def gathered_mm_dw_of_output(
    dy_TN: Tensor, x_RK: Tensor, ends_G: Tensor, source_R: Tensor
) -> Tensor:
    """Give that of one whose rows were added up: ``dw[g] = dy[source][g].T @ x[g]``."""
    check_source(source_R)
    if not _is_read_in_place(dy_TN, source_R, _UNIT) or not (x_RK.numel() and len(ends_G)):
        return grouped_mm_dw(permute(dy_TN, source_R), x_RK, ends_G)
    _check_dw(x_RK, dy_TN, ends_G, source_R)
    return multiply_gathered_columns(dy_TN, aligned(x_RK), source_R, ends_G, Copies.OF_GRADIENT)


def _is_read_in_place(tokens: Tensor, source_R: Tensor, columns: int) -> bool:
    """Say if the kernels for Hopper read rows of these tokens, in blocks of so many columns."""
    if tokens.dtype not in DTYPES or tokens.ndim != 2 or not (tokens.numel() and len(source_R)):
        return False
    if tokens.shape[1] % columns or tokens.stride(0) % _UNIT or not is_aligned(tokens):
        return False
    return torch.cuda.get_device_capability(tokens.device)[0] == _HOPPER


def _check_dw(rows: Tensor, tokens: Tensor, ends_G: Tensor, source_R: Tensor) -> None:
    # The copies would have as many rows as there are sources; no value of them is looked at.
    check_grouped_dw(rows, tokens[:1].expand(len(source_R), -1), ends_G)
