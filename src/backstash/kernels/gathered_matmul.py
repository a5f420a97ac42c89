"""Grouped products of rows that are elsewhere, on a GPU: the twins of the reference.

Rows are copies of tokens, or they are in pages.  On a Hopper GPU 16-bit floats are read from where
the tokens are, and every number of the result is that of the products of copies.  Elsewhere, and
where a token is not whole units of memory, the copies are made first.  Rows in pages are read there
or not at all: :func:`multiplies_pages` says it, and whoever has them copies them back.

Letters: T tokens, R rows, K input features, N output features, G groups.
"""

from __future__ import annotations

from torch import Tensor

from backstash.device import capability
from backstash.kernels.grouped_matmul import grouped_mm, grouped_mm_dw, grouped_mm_dx
from backstash.kernels.paged_rows import is_in_chunks
from backstash.kernels.permutation import permute
from backstash.kernels.reference.gathered_mm import check_source
from backstash.kernels.reference.grouped_mm import check_grouped, check_grouped_dw
from backstash.kernels.reference.paged_rows import InPages
from backstash.kernels.reference.slabs import Slabs

try:
    from backstash.kernels.gathered_columns import (
        CHUNK,
        Copies,
        multiply_gathered_columns,
        multiply_paged_columns,
    )
    from backstash.kernels.gathered_rows import multiply_gathered_rows
    from backstash.kernels.slab_columns import multiply_slab_columns
    from backstash.kernels.warpgroups import DTYPES, aligned, is_aligned
except (ImportError, AttributeError):
    # Gluon is new in Triton and still changes its names.
    DTYPES, CHUNK = {}, 1

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


def multiplies_pages(paged: InPages) -> bool:
    """Does :func:`grouped_mm_dw_of_pages` read this matrix where it is?"""
    if isinstance(paged, Slabs):
        return True
    if paged.dtype not in DTYPES or len(paged.shape) != 2 or not is_in_chunks(paged, CHUNK):
        return False
    return capability(paged.device)[0] == _HOPPER


def grouped_mm_dw_of_pages(dy_TN: Tensor, x: InPages, ends_G: Tensor) -> Tensor:
    """Give the gradient of a weight whose rows are in pages: ``dw[g] = dy[g].T @ x[g]``."""
    check_grouped_dw(dy_TN, dy_TN.new_empty(1, dtype=x.dtype).expand(x.shape), ends_G)
    groups = ends_G.shape[0]
    if not (dy_TN.numel() and groups):
        return dy_TN.new_zeros(groups, dy_TN.shape[1], x.shape[1])
    if isinstance(x, Slabs):
        return multiply_slab_columns(aligned(dy_TN), x, ends_G)
    return multiply_paged_columns(aligned(dy_TN), x, ends_G)


def _is_read_in_place(tokens: Tensor, source_R: Tensor, columns: int) -> bool:
    """Say if the kernels for Hopper read rows of these tokens, in blocks of so many columns."""
    if tokens.dtype not in DTYPES or tokens.ndim != 2 or not (tokens.numel() and len(source_R)):
        return False
    if tokens.shape[1] % columns or tokens.stride(0) % _UNIT or not is_aligned(tokens):
        return False
    return capability(tokens.device)[0] == _HOPPER


def _check_dw(rows: Tensor, tokens: Tensor, ends_G: Tensor, source_R: Tensor) -> None:
    # The copies would have as many rows as there are sources; no value of them is looked at.
    check_grouped_dw(rows, tokens[:1].expand(len(source_R), -1), ends_G)
