"""Matrix multiplication over groups of rows: each group has its own weight.

The rows of all groups lie one after another in one buffer.  ``ends_G[g]`` is the row
after the last row of group ``g``; the rows past ``ends_G[-1]`` are the tail, which is
room that nobody filled.  Group sizes live on the device and are read on the host only
when that device is the CPU.

Letters: T rows of the buffer, K input features, N output features, G groups.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from backstash.errors import DtypeError, ShapeError


def row_groups(ends_G: Tensor, rows: int) -> Tensor:
    """Tell the group of every row: ``(T,)`` int64, with ``G`` for a row of the tail.

    An empty group owns no row, because a row belongs to the first group that ends
    after it.
    """
    row_T = torch.arange(rows, device=ends_G.device, dtype=ends_G.dtype)
    return torch.searchsorted(ends_G.contiguous(), row_T, right=True)


def grouped_mm(x_TK: Tensor, w_GNK: Tensor, ends_G: Tensor) -> Tensor:
    """Multiply each row by its group's weight: ``y_TN[t] = w_GNK[g(t)] @ x_TK[t]``.

    Raises:
        ShapeError: the shapes do not fit each other.
        DtypeError: the dtypes differ, or ``ends_G`` is not int32 or int64.
    """
    check_grouped("grouped_mm", x_TK, w_GNK, ends_G, columns_dim=2)
    return _mm_rows(x_TK, w_GNK.transpose(1, 2), ends_G)


def grouped_mm_dx(dy_TN: Tensor, w_GNK: Tensor, ends_G: Tensor) -> Tensor:
    """Give the gradient of :func:`grouped_mm`'s rows: ``dx_TK[t] = dy_TN[t] @ w_GNK[g(t)]``.

    Raises:
        ShapeError: the shapes do not fit each other.
        DtypeError: the dtypes differ, or ``ends_G`` is not int32 or int64.
    """
    check_grouped("grouped_mm_dx", dy_TN, w_GNK, ends_G, columns_dim=1)
    return _mm_rows(dy_TN, w_GNK, ends_G)


def grouped_mm_dw(dy_TN: Tensor, x_TK: Tensor, ends_G: Tensor) -> Tensor:
    """Give the gradient of :func:`grouped_mm`'s weight: ``dw_GNK[g] = dy[g].T @ x[g]``.

    A group without rows gets exact zeros: the sum over nothing.

    Raises:
        ShapeError: the two do not have the same number of rows.
        DtypeError: the dtypes differ, or ``ends_G`` is not int32 or int64.
    """
    check_grouped_dw(dy_TN, x_TK, ends_G)
    groups, rows = ends_G.shape[0], x_TK.shape[0]
    dw_GNK = x_TK.new_zeros(groups, dy_TN.shape[1], x_TK.shape[1])
    if dw_GNK.numel() == 0 or rows == 0:
        return dw_GNK
    if x_TK.is_cuda:
        for g, m_T in enumerate(_masks(ends_G, rows)):
            # Both sides are masked: a zero times the other side's NaN would be NaN.
            dy = _wide(dy_TN).where(m_T, 0)
            dw_GNK[g] = dy.t() @ _wide(x_TK).where(m_T, 0)
        return dw_GNK
    for g, start, end in _spans(ends_G, rows):
        dw_GNK[g] = _wide(dy_TN[start:end]).t() @ _wide(x_TK[start:end])
    return dw_GNK


def group_sum(x_TN: Tensor, ends_G: Tensor) -> Tensor:
    """Add up the rows of each group: ``(G, N)``, exact zeros for an empty group.

    Raises:
        ShapeError: ``x_TN`` is not two-dimensional.
    """
    check_group_sum(x_TN, ends_G)
    sum_GN = x_TN.new_zeros(ends_G.shape[0], x_TN.shape[1])
    if x_TN.is_cuda:
        for g, m_T in enumerate(_masks(ends_G, x_TN.shape[0])):
            sum_GN[g] = _wide(x_TN).where(m_T, 0).sum(0)
        return sum_GN
    for g, start, end in _spans(ends_G, x_TN.shape[0]):
        sum_GN[g] = _wide(x_TN[start:end]).sum(0)
    return sum_GN


def add_group_bias(y_TN: Tensor, bias_GN: Tensor, ends_G: Tensor) -> Tensor:
    """Add each group's bias to its rows; the tail of the result is zeros.

    Raises:
        ShapeError: ``bias_GN`` is not one row of ``N`` for each group.
    """
    check_group_bias(y_TN, bias_GN, ends_G)
    group_T = row_groups(ends_G, y_TN.shape[0])
    none_1N = bias_GN.new_zeros(1, bias_GN.shape[1])
    bias_TN = torch.cat([bias_GN, none_1N]).index_select(0, group_T)
    sum_TN = _wide(y_TN) + bias_TN
    return sum_TN.where((group_T < ends_G.shape[0]).unsqueeze(1), 0).to(y_TN.dtype)


def _mm_rows(a_TJ: Tensor, b_GJC: Tensor, ends_G: Tensor) -> Tensor:
    """Multiply each row from the right by its group's matrix; both row-wise products."""
    rows, columns = a_TJ.shape[0], b_GJC.shape[2]
    out_TC = a_TJ.new_zeros(rows, columns)
    if out_TC.numel() == 0 or b_GJC.shape[0] == 0 or b_GJC.shape[1] == 0:
        return out_TC
    if a_TJ.is_cuda:
        for g, m_T in enumerate(_masks(ends_G, rows)):
            out_TC = (_wide(a_TJ) @ _wide(b_GJC[g])).to(out_TC.dtype).where(m_T, out_TC)
        return out_TC
    for g, start, end in _spans(ends_G, rows):
        # By length, not by end: then torch 2.11 can export it too, where no number is known.
        a_J, out_C = (x.narrow(0, start, end - start) for x in (a_TJ, out_TC))
        out_C.copy_(_wide(a_J) @ _wide(b_GJC[g]))
    return out_TC


def _spans(ends_G: Tensor, rows: int) -> Iterator[tuple[int, int, int]]:
    """Walk over ``(group, start, end)``; CPU only, because it reads the ends."""
    start = 0
    for g, end in enumerate(ends_G.clamp(0, rows).tolist()):
        yield g, start, max(start, end)
        start = max(start, end)


def _masks(ends_G: Tensor, rows: int) -> Iterator[Tensor]:
    """Walk over the groups, giving for each a ``(T, 1)`` mask of its rows."""
    group_T = row_groups(ends_G, rows)
    for g in range(ends_G.shape[0]):
        yield (group_T == g).unsqueeze(1)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


def check_grouped(
    kernel: str, x: Tensor, w_GNK: Tensor, ends_G: Tensor, *, columns_dim: int
) -> None:
    """Refuse operands of a grouped product that do not fit each other."""
    check_ends(kernel, ends_G)
    check_dtypes(kernel, x, w_GNK)
    if x.ndim != 2 or w_GNK.ndim != 3 or x.shape[1] != w_GNK.shape[columns_dim]:
        side = "K" if columns_dim == 2 else "N"
        raise ShapeError(
            f"{kernel} needs rows (T, {side}) and weights (G, N, K), got {tuple(x.shape)} and "
            f"{tuple(w_GNK.shape)}; make dimension {columns_dim} of the weights the row length"
        )
    if w_GNK.shape[0] != ends_G.shape[0]:
        raise ShapeError(
            f"{kernel} needs one end for each of the {w_GNK.shape[0]} weights, got "
            f"{ends_G.shape[0]} ends; give an empty group an end equal to the one before"
        )


def check_grouped_dw(dy_TN: Tensor, x_TK: Tensor, ends_G: Tensor) -> None:
    """Refuse a gradient and an input that are not of the same rows and dtype."""
    check_ends("grouped_mm_dw", ends_G)
    check_dtypes("grouped_mm_dw", dy_TN, x_TK)
    if dy_TN.ndim != 2 or x_TK.ndim != 2 or dy_TN.shape[0] != x_TK.shape[0]:
        raise ShapeError(
            f"grouped_mm_dw needs (T, N) and (T, K) with the same T, got {tuple(dy_TN.shape)} "
            f"and {tuple(x_TK.shape)}; pass the gradient and the input of the same rows"
        )


def check_ends(kernel: str, ends_G: Tensor) -> None:
    """Refuse ends that are not one integer for each group."""
    if ends_G.ndim != 1:
        raise ShapeError(
            f"{kernel} needs ends of shape (G,), got {tuple(ends_G.shape)}; "
            "pass the running sum of the rows of each group"
        )
    if ends_G.dtype not in (torch.int32, torch.int64):
        raise DtypeError(
            f"{kernel} needs ends in int32 or int64, got {ends_G.dtype}; cast them with .int()"
        )


def check_dtypes(kernel: str, a: Tensor, b: Tensor) -> None:
    """Refuse operands of two dtypes."""
    if a.dtype is not b.dtype:
        raise DtypeError(
            f"{kernel} needs both operands in one dtype, got {a.dtype} and {b.dtype}; "
            "cast one of them before the call"
        )


def check_group_sum(x_TN: Tensor, ends_G: Tensor) -> None:
    """Refuse what are not rows."""
    check_ends("group_sum", ends_G)
    if x_TN.ndim != 2:
        raise ShapeError(
            f"group_sum needs (T, N), got {tuple(x_TN.shape)}; flatten the leading dimensions"
        )


def check_group_bias(y_TN: Tensor, bias_GN: Tensor, ends_G: Tensor) -> None:
    """Refuse a bias that is not one row for each group."""
    check_ends("add_group_bias", ends_G)
    wanted = (ends_G.shape[0], y_TN.shape[-1])
    if y_TN.ndim != 2 or tuple(bias_GN.shape) != wanted:
        raise ShapeError(
            f"add_group_bias needs rows (T, N) and a bias (G, N) = {wanted}, got "
            f"{tuple(y_TN.shape)} and {tuple(bias_GN.shape)}; give each group one bias"
        )
