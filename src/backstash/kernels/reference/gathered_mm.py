"""Matrix multiplication over groups of rows that are copies of tokens.

The three products of :mod:`backstash.kernels.reference.grouped_mm` with ``x[source_R]`` in the
place of an operand.  Here the copies are made first; what multiplies on a GPU may read each row
from where its token is, and then they are never made.

Letters: T tokens, R rows, K input features, N output features, G groups.
"""

import torch
from torch import Tensor

from backstash.errors import DtypeError, ShapeError
from backstash.kernels.reference.grouped_mm import grouped_mm, grouped_mm_dw, grouped_mm_dx
from backstash.kernels.reference.permute import permute


def gathered_mm(x_TK: Tensor, w_GNK: Tensor, ends_G: Tensor, source_R: Tensor) -> Tensor:
    """Give each row's token times the row's weight: ``y_RN[r] = w_GNK[g(r)] @ x_TK[source_R[r]]``.

    Raises:
        ShapeError, DtypeError: as :func:`grouped_mm` does, or ``source_R`` are no integers (R,).
    """
    check_source(source_R)
    return grouped_mm(permute(x_TK, source_R), w_GNK, ends_G)


def gathered_mm_dx(dy_TN: Tensor, w_GNK: Tensor, ends_G: Tensor, source_R: Tensor) -> Tensor:
    """Give the same the other way: ``dx_RK[r] = dy_TN[source_R[r]] @ w_GNK[g(r)]``.

    Raises:
        ShapeError, DtypeError: as :func:`grouped_mm_dx` does, or ``source_R`` are no integers.
    """
    check_source(source_R)
    return grouped_mm_dx(permute(dy_TN, source_R), w_GNK, ends_G)


def gathered_mm_dw_of_input(
    dy_RN: Tensor, x_TK: Tensor, ends_G: Tensor, source_R: Tensor
) -> Tensor:
    """Give the gradient of a weight that multiplied copies: ``dw[g] = dy[g].T @ x[source][g]``.

    Raises:
        ShapeError, DtypeError: as :func:`grouped_mm_dw` does, or ``source_R`` are no integers.
    """
    check_source(source_R)
    return grouped_mm_dw(dy_RN, permute(x_TK, source_R), ends_G)


def gathered_mm_dw_of_output(
    dy_TN: Tensor, x_RK: Tensor, ends_G: Tensor, source_R: Tensor
) -> Tensor:
    """Give that of one whose rows were added up by token: ``dw[g] = dy[source][g].T @ x[g]``.

    Raises:
        ShapeError, DtypeError: as :func:`grouped_mm_dw` does, or ``source_R`` are no integers.
    """
    check_source(source_R)
    return grouped_mm_dw(permute(dy_TN, source_R), x_RK, ends_G)


def check_source(source_R: Tensor) -> None:
    """Refuse what are not row numbers."""
    if source_R.ndim != 1:
        raise ShapeError(
            f"a gathered product needs sources (R,), got {tuple(source_R.shape)}; pass the "
            "source_R that sort_by_expert returned"
        )
    if source_R.dtype not in (torch.int32, torch.int64):
        raise DtypeError(
            f"a gathered product needs sources in int32 or int64, got {source_R.dtype}; cast "
            "them with .long()"
        )
