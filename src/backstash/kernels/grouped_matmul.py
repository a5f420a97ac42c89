"""Matrix multiplication over groups of rows on a GPU: the twins of the reference.

On a Hopper GPU 16-bit floats have kernels of their own, which write every row and every gradient
in one launch.  On a Blackwell GPU of the first kind (10.x) bfloat16 goes to torch's grouped matmul,
which reads the sizes of the groups on the device there; on others it copies them to the host.  It
leaves two things to us: the tail of its output, and the weight gradient of an empty group, are not
written at all.  Both are zeroed by programs that end at once where there is nothing to do, so no
byte of the valid rows is touched twice.  All else has plain kernels, and GPUs before those with
bfloat16 run the reference.

Letters: T rows of the buffer, K input features, N output features, G groups.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from backstash.device import capability
from backstash.kernels import grouped_plain
from backstash.kernels.blocks import block_count, block_table, locate_block, unit_columns
from backstash.kernels.launches import Launcher
from backstash.kernels.reference import grouped_mm as reference
from backstash.kernels.reference.grouped_mm import (
    check_group_bias,
    check_group_sum,
    check_grouped,
    check_grouped_dw,
)
from backstash.kernels.sizes import ceil_div, next_power_of_2

try:
    from backstash.kernels.grouped_columns import multiply_columns
    from backstash.kernels.grouped_rows import multiply_rows
    from backstash.kernels.warpgroups import DTYPES, aligned
except (ImportError, AttributeError):
    # Gluon is new in Triton and still changes its names; without it, torch multiplies.
    DTYPES = {}

# The fast matmul of torch wants every stride to be whole 16-byte units.
_ALIGNED_BYTES = 16
_FIRST_WITH_KERNELS = (8, 0)
# The generations on which torch reads the sizes of the groups on the device.
_TORCH_MAJORS = (9, 10)
_HOPPER = 9
_ROWS = 32
_COLUMNS = 256
_ZEROS = 8192
# Parts into which the rows of a group are cut, so that one large group keeps a GPU busy.
_PARTS = 16


@triton.jit
def _zero_tail_kernel(p_y, p_ends, groups, rows, columns, B: tl.constexpr, BK: tl.constexpr):
    last = tl.load(p_ends + groups - 1)
    i_row = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    if tl.program_id(0) * B + B > last:
        for first in range(0, columns, BK):
            i_column = first + tl.arange(0, BK)
            mask = ((i_row >= last) & (i_row < rows))[:, None] & (i_column < columns)[None, :]
            zeros = tl.zeros([B, BK], p_y.dtype.element_ty)
            tl.store(p_y + i_row[:, None] * columns + i_column[None, :], zeros, mask=mask)


@triton.jit
def _zero_empty_groups_kernel(p_dw, p_ends, size, chunks, BLOCK: tl.constexpr):
    group = tl.program_id(0) // chunks
    end = tl.load(p_ends + group)
    start = tl.load(p_ends + group - 1, mask=group > 0, other=0)
    if end <= start:
        i = (tl.program_id(0) % chunks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        p_group = p_dw + tl.cast(group, tl.int64) * size
        tl.store(p_group + i, tl.zeros([BLOCK], p_dw.dtype.element_ty), mask=i < size)


@triton.jit
def _group_sum_kernel(
    p_x,
    p_ends,
    p_sum,
    groups,
    rows,
    columns,
    row_stride,
    PARTS: tl.constexpr,
    B: tl.constexpr,
    BK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The sum of every PARTS-th block of rows of one group, over some of the columns."""
    chunks = tl.cdiv(columns, BK)
    i_column = (tl.program_id(0) % chunks) * BK + tl.arange(0, BK)
    group = tl.program_id(0) // chunks // PARTS
    part = tl.program_id(0) // chunks % PARTS
    end = tl.minimum(tl.load(p_ends + group), rows)
    start = tl.load(p_ends + group - 1, mask=group > 0, other=0)
    total = tl.zeros([B, BK], WIDE)
    for first in range(start + part * B, end, PARTS * B):
        i_row = tl.cast(first, tl.int64) + tl.arange(0, B)
        mask = (i_row < end)[:, None] & (i_column < columns)[None, :]
        p_tile = p_x + i_row[:, None] * row_stride + i_column[None, :]
        total += tl.load(p_tile, mask=mask, other=0).to(WIDE)
    o_sum = (part * groups + group).to(tl.int64) * columns
    tl.store(p_sum + o_sum + i_column, tl.sum(total, 0), mask=i_column < columns)


@triton.jit
def _add_bias_kernel(
    p_y,
    p_bias,
    p_sum,
    p_table,
    groups,
    rows,
    columns,
    y_stride,
    B: tl.constexpr,
    BK: tl.constexpr,
    WIDE: tl.constexpr,
):
    chunks = tl.cdiv(columns, BK)
    i_block = tl.program_id(0) // chunks
    i_column = (tl.program_id(0) % chunks) * BK + tl.arange(0, BK)
    m_column = i_column < columns
    first, end, group = locate_block(p_table, rows, i_block, B)
    i_row = (first + tl.arange(0, B)).to(tl.int64)
    m_read = (i_row < tl.where(group < groups, end, first))[:, None] & m_column[None, :]
    y = tl.load(p_y + i_row[:, None] * y_stride + i_column[None, :], mask=m_read, other=0)
    p_bias += tl.cast(tl.minimum(group, groups - 1), tl.int64) * columns
    bias = tl.load(p_bias + i_column, mask=m_column, other=0).to(WIDE)
    total = tl.where(m_read, y.to(WIDE) + bias[None, :], 0.0)
    mask = (i_row < end)[:, None] & m_column[None, :]
    p_tile = p_sum + i_row[:, None] * columns + i_column[None, :]
    tl.store(p_tile, total.to(p_sum.dtype.element_ty), mask=mask)


_sum_parts = Launcher(_group_sum_kernel)
_add_bias = Launcher(_add_bias_kernel)


def grouped_mm(x_TK: Tensor, w_GNK: Tensor, ends_G: Tensor) -> Tensor:
    """Multiply each row by its group's weight: ``y_TN[t] = w_GNK[g(t)] @ x_TK[t]``."""
    if not _has_kernels(x_TK):
        return reference.grouped_mm(x_TK, w_GNK, ends_G)
    check_grouped("grouped_mm", x_TK, w_GNK, ends_G, columns_dim=2)
    return _mm_rows(x_TK, w_GNK, ends_G, is_turned=True)


def grouped_mm_dx(dy_TN: Tensor, w_GNK: Tensor, ends_G: Tensor) -> Tensor:
    """Give the gradient of :func:`grouped_mm`'s rows: ``dx_TK[t] = dy_TN[t] @ w_GNK[g(t)]``."""
    if not _has_kernels(dy_TN):
        return reference.grouped_mm_dx(dy_TN, w_GNK, ends_G)
    check_grouped("grouped_mm_dx", dy_TN, w_GNK, ends_G, columns_dim=1)
    return _mm_rows(dy_TN, w_GNK, ends_G, is_turned=False)


def grouped_mm_dw(dy_TN: Tensor, x_TK: Tensor, ends_G: Tensor) -> Tensor:
    """Give the gradient of :func:`grouped_mm`'s weight: ``dw_GNK[g] = dy[g].T @ x[g]``."""
    if not _has_kernels(dy_TN):
        return reference.grouped_mm_dw(dy_TN, x_TK, ends_G)
    check_grouped_dw(dy_TN, x_TK, ends_G)
    groups, rows = ends_G.shape[0], x_TK.shape[0]
    if not (groups and rows and dy_TN.shape[1] and x_TK.shape[1]):
        return x_TK.new_zeros(groups, dy_TN.shape[1], x_TK.shape[1])
    if _is_for_hopper(x_TK):
        return multiply_columns(aligned(dy_TN), aligned(x_TK), ends_G)
    if not _is_for_torch(x_TK):
        return grouped_plain.multiply_columns(dy_TN, x_TK, ends_G)
    ends_G = ends_G.clamp(0, rows).int()
    dw_GNK = F.grouped_mm(_pad(dy_TN).t(), _pad(x_TK), offs=ends_G)
    size = dw_GNK[0].numel()
    chunks = ceil_div(size, _ZEROS)
    tile: dict[str, Any] = {"BLOCK": _ZEROS}
    _zero_empty_groups_kernel[(groups * chunks,)](dw_GNK, ends_G, size, chunks, **tile)
    return dw_GNK[:, : dy_TN.shape[1], : x_TK.shape[1]]


def group_sum(x_TN: Tensor, ends_G: Tensor) -> Tensor:
    """Add up the rows of each group: ``(G, N)``, exact zeros for an empty group."""
    check_group_sum(x_TN, ends_G)
    x_TN = unit_columns(x_TN)
    groups, (rows, columns) = ends_G.shape[0], x_TN.shape
    is_double = x_TN.dtype is torch.float64
    sum_PGN = torch.empty(
        _PARTS,
        groups,
        columns,
        dtype=torch.float64 if is_double else torch.float32,
        device=x_TN.device,
    )
    tile: dict[str, Any] = {
        "PARTS": _PARTS,
        "B": _ROWS,
        "BK": min(_COLUMNS, max(16, next_power_of_2(columns))),
        "WIDE": tl.float64 if is_double else tl.float32,
    }
    programs = groups * _PARTS * ceil_div(columns, tile["BK"])
    if programs:
        _sum_parts(
            programs,
            x_TN,
            ends_G.contiguous(),
            sum_PGN,
            groups,
            rows,
            columns,
            x_TN.stride(0),
            **tile,
        )
    return sum_PGN.sum(0).to(x_TN.dtype)


def add_group_bias(y_TN: Tensor, bias_GN: Tensor, ends_G: Tensor) -> Tensor:
    """Add each group's bias to its rows; the tail of the result is zeros."""
    check_group_bias(y_TN, bias_GN, ends_G)
    y_TN = unit_columns(y_TN)
    rows, columns = y_TN.shape
    sum_TN = torch.empty(rows, columns, dtype=y_TN.dtype, device=y_TN.device)
    is_double = torch.float64 in (y_TN.dtype, bias_GN.dtype)
    tile: dict[str, Any] = {
        "B": _ROWS,
        "BK": min(_COLUMNS, max(16, next_power_of_2(columns))),
        "WIDE": tl.float64 if is_double else tl.float32,
    }
    programs = block_count(rows, ends_G, _ROWS) * ceil_div(columns, tile["BK"])
    if programs:
        _add_bias(
            programs,
            y_TN,
            bias_GN.contiguous(),
            sum_TN,
            block_table(ends_G, rows, _ROWS),
            ends_G.shape[0],
            rows,
            columns,
            y_TN.stride(0),
            **tile,
        )
    return sum_TN


def _mm_rows(a_TJ: Tensor, b: Tensor, ends_G: Tensor, *, is_turned: bool) -> Tensor:
    """Multiply each row from the right by its group's matrix; both row-wise products.

    ``b`` is ``(G, J, C)``, or turned, ``(G, C, J)``.
    """
    if b.stride(1) == 1 and b.stride(2) != 1:
        b, is_turned = b.mT, not is_turned
    rows, columns = a_TJ.shape[0], b.shape[1] if is_turned else b.shape[2]
    if not (rows and columns and b.shape[0] and a_TJ.shape[1]):
        return a_TJ.new_zeros(rows, columns)
    if _is_for_hopper(a_TJ):
        return multiply_rows(aligned(a_TJ), aligned(b), ends_G, is_turned=is_turned)
    if not _is_for_torch(a_TJ):
        return grouped_plain.multiply_rows(a_TJ, b.mT if is_turned else b, ends_G)
    ends_G = ends_G.clamp(0, rows).int()
    b_GJC = _pad(b).mT if is_turned else _pad(b)
    out_TC = F.grouped_mm(_pad(a_TJ), b_GJC, offs=ends_G)
    zero_tail_(out_TC, ends_G)
    return out_TC[:, :columns]


def zero_tail_(y_TN: Tensor, ends_G: Tensor) -> None:
    """Write zeros into the rows past the last group of a contiguous ``(T, N)``."""
    rows, columns = y_TN.shape
    tile: dict[str, Any] = {"B": _ROWS, "BK": _COLUMNS}
    _zero_tail_kernel[(ceil_div(rows, _ROWS),)](
        y_TN, ends_G, ends_G.shape[0], rows, columns, **tile
    )


def _has_kernels(x: Tensor) -> bool:
    """Say if this GPU multiplies all dtypes by kernels."""
    return capability(x.device) >= _FIRST_WITH_KERNELS


def _is_for_hopper(x: Tensor) -> bool:
    """Say if the kernels for Hopper multiply groups of this tensor."""
    return x.dtype in DTYPES and capability(x.device)[0] == _HOPPER


def _is_for_torch(x: Tensor) -> bool:
    """Say if torch multiplies groups of this tensor without reading their sizes."""
    if x.dtype is not torch.bfloat16:
        return False
    return capability(x.device)[0] in _TORCH_MAJORS


def _pad(x: Tensor) -> Tensor:
    """Append zeros to the last dimension, of matrices to both, up to whole aligned units."""
    unit = _ALIGNED_BYTES // x.element_size()
    zeros = [0, -x.shape[-1] % unit] + [0, -x.shape[-2] % unit] * (x.ndim == 3)
    x = F.pad(x, zeros) if any(zeros) else x.contiguous()
    return x.clone() if x.data_ptr() % _ALIGNED_BYTES else x
