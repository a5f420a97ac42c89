"""The random Hadamard transform on a GPU: the twin of ``backstash.kernels.reference.hadamard``.

The sixteen rows of a block are sixteen tensors in registers, and the matrix is only signs,
which are known when a kernel is compiled: sums and differences of a quarter of each row, in
the order of the rows.  Columns of the matrix whose first signs agree share their first sums.

Letters: M rows, K columns, G groups, B rows of a program.
"""

# What is known when a kernel is compiled has a type that this checker takes for Python's.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.blocks import (
    block_count,
    block_table,
    group_number,
    locate_block,
    unit_columns,
)
from backstash.kernels.nvfp4_codes import largest_of
from backstash.kernels.reference.hadamard import SIGNS

# The rows whose sign is minus, as bits.
_MINUS = tl.constexpr(sum(1 << i for i, sign in enumerate(SIGNS) if sign < 0))
# Sylvester's sign is the parity of the bits that two numbers have in common: here of each number.
_ODD = tl.constexpr(0x6996)
_BLOCK = 128
_COLUMNS, _COLUMNS_A_THREAD = 512, 4


@triton.jit
def _quarters(x):
    quarters = ()
    for i in tl.static_range(16):
        quarters += (x[i] * 0.25,)
    return quarters


@triton.jit
def rotate(x):
    """Sums of bfloat16 values, not rounded yet: ``y[j] = sum_i x[i] R[i, j]``."""
    y, x = (), _quarters(x)
    for j in tl.static_range(16):
        # From zero on, so that no sum of zeros is a negative zero.
        total = tl.zeros_like(x[0])
        for i in tl.static_range(16):
            if ((_ODD >> (i & j)) ^ (_MINUS >> i)) & 1:
                total -= x[i]
            else:
                total += x[i]
        y += (total,)
    return y


@triton.jit
def narrow(x):
    """The nearest bfloat16 of float32 values, as float32."""
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def rotate_back(y):
    """``x[i] = sum_j y[j] R[i, j]`` in float32."""
    x, y = (), _quarters(y)
    for i in tl.static_range(16):
        total = tl.zeros_like(y[0])
        for j in tl.static_range(16):
            if (_ODD >> (i & j)) & 1:
                total -= y[j]
            else:
                total += y[j]
        # The sign of a row is that of its whole sum; a sum that is zero is a positive one.
        if (_MINUS >> i) & 1:
            total = 0.0 - total
        x += (total,)
    return x


@triton.jit(do_not_specialize=["groups", "rows"])
def _rotated_amax_kernel(
    p_x,
    p_amax,
    p_table,
    groups,
    rows,
    columns,
    row_stride,
    B: tl.constexpr,
    BK: tl.constexpr,
    V: tl.constexpr,
):
    chunks = tl.cdiv(columns, BK)
    i_block = tl.program_id(0) // chunks
    i_column = tl.max_contiguous((tl.program_id(0) % chunks) * BK + tl.arange(0, BK), V)
    m_column = i_column < columns
    first, end, group = locate_block(p_table, rows, i_block, B)
    if group < groups:
        stride = tl.cast(row_stride, tl.int64)
        largest = tl.zeros([BK], tl.float32)
        for i in range(first, end, 16):
            i_row = tl.zeros([BK], tl.int32) + i
            p_row = p_x + i_row * stride + i_column
            x = ()
            for k in tl.static_range(16):
                row = tl.load(p_row + k * stride, mask=m_column & (i_row + k < end), other=0)
                x += (narrow(row.to(tl.float32)),)
            largest = tl.maximum(largest, largest_of(rotate(x)))
        # The largest of rounded values is the largest value, rounded.  Bits of floats that are
        # not negative are ordered as the floats are.
        bits = narrow(largest).to(tl.int32, bitcast=True)
        p_group = p_amax + tl.cast(group, tl.int64) * columns
        tl.atomic_max(p_group + i_column, bits, mask=m_column, sem="relaxed")


def rotated_column_amax(x_MK: Tensor, rotation_BB: Tensor, ends_G: Tensor | None = None) -> Tensor:
    """Largest magnitude of each column after :func:`rotate`, ``(1, K)`` or ``(G, K)``.

    ``rotation_BB`` is ``hadamard_matrix``, whose signs are compiled into the kernel.
    """
    x_MK = unit_columns(x_MK)
    rows, columns = x_MK.shape
    amax_GK = torch.zeros(group_number(ends_G), columns, dtype=torch.int32, device=x_MK.device)
    BK = min(_COLUMNS, max(32, triton.next_power_of_2(columns)))
    tile: dict[str, Any] = {"B": _BLOCK, "BK": BK, "V": _COLUMNS_A_THREAD}
    programs = block_count(rows, ends_G, _BLOCK) * triton.cdiv(columns, BK)
    if programs:
        _rotated_amax_kernel[(programs,)](
            x_MK,
            amax_GK,
            block_table(ends_G, rows, _BLOCK),
            group_number(ends_G),
            rows,
            columns,
            x_MK.stride(0),
            **tile,
            # A quarter is exact, a sum is rounded: one may not be added to the other unrounded.
            enable_fp_fusion=False,
        )
    return amax_GK.view(torch.float32)
