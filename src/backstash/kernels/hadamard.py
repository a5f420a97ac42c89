"""The random Hadamard transform on a GPU: the twin of ``backstash.kernels.reference.hadamard``.

The sixteen rows of a block are sixteen tensors in registers, so the transform is sums and
differences of registers, by halves as in the reference.  The signs of the rows are known when
a kernel is compiled.

Letters: M rows, K columns, G groups, B rows of a program.
"""

# What is known when a kernel is compiled has a type that this checker takes for Python's.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.blocks import (
    block_count,
    group_number,
    unit_columns,
)
from backstash.kernels.nvfp4_places import find_block
from backstash.kernels.reference.hadamard import SIGNS
from backstash.kernels.sizes import ceil_div, next_power_of_2

# The rows whose sign is minus, as bits.
_MINUS = tl.constexpr(sum(1 << i for i, sign in enumerate(SIGNS) if sign < 0))
# Rows, columns and warps of a program, by whether groups have few rows or many.
_FEW, _MANY, _COLUMNS_A_THREAD = (128, 128, 1), (256, 512, 4), 4


@triton.jit
def _sign(i: tl.constexpr):
    """The sign of a row."""
    return 1 - 2 * ((_MINUS >> i) & 1)


@triton.jit
def _halves(x):
    """A quarter of each value with the sign of its row; their first sums and differences."""
    upper, lower = (), ()
    zero = tl.zeros_like(x[0])
    for i in tl.static_range(8):
        # With a zero added no zero is negative, and zeros stay zeros.  A quarter of a bfloat16
        # is exact, so the quarter and the sum are one operation.
        quarter = tl.fma(x[i], zero + _sign(i) * 0.25, zero)
        upper += (tl.fma(x[i + 8], zero + _sign(i + 8) * 0.25, quarter),)
        lower += (tl.fma(x[i + 8], zero - _sign(i + 8) * 0.25, quarter),)
    return upper + lower


@triton.jit
def _mix(x, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Sums and differences of places that differ in one bit: bit FIRST down to bit LAST."""
    for step in tl.static_range(FIRST - LAST + 1):
        mixed = ()
        for i in tl.static_range(16):
            if (i >> (FIRST - step)) & 1:
                mixed += (x[i - (1 << (FIRST - step))] - x[i],)
            else:
                mixed += (x[i] + x[i + (1 << (FIRST - step))],)
        x = mixed
    return x


@triton.jit
def rotate(x):
    """Sums of bfloat16 values, not rounded yet: ``y[j] = sum_i x[i] R[i, j]``."""
    return _mix(_halves(x), 2, 0)


@triton.jit
def _largest_rotated(x):
    """The largest magnitude of :func:`rotate`; a NaN does not count."""
    x = _mix(_halves(x), 2, 1)
    largest = tl.zeros_like(x[0])
    for i in tl.static_range(8):
        # The larger one of a sum and a difference is the sum of the magnitudes.
        largest = tl.maximum(largest, tl.abs(x[2 * i]) + tl.abs(x[2 * i + 1]))
    return largest


@triton.jit
def narrow(x):
    """The nearest bfloat16 of float32 values, as float32."""
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def rotate_back(y):
    """``x[i] = sum_j y[j] R[i, j]`` in float32."""
    quarters = ()
    for j in tl.static_range(16):
        quarters += (y[j] * 0.25,)
    x, y = (), _mix(quarters, 3, 0)
    for i in tl.static_range(16):
        # The sign of a row is that of its whole sum; a sum that is zero is a positive one.
        if (_MINUS >> i) & 1:
            x += (0.0 - y[i],)
        else:
            x += (y[i],)
    return x


@triton.jit(do_not_specialize=["groups", "rows"])
def _rotated_amax_kernel(
    p_x,
    p_amax,
    p_ends,
    p_noop,
    groups,
    rows,
    columns,
    row_stride,
    B: tl.constexpr,
    BK: tl.constexpr,
    V: tl.constexpr,
    BG: tl.constexpr,
):
    if p_noop is not None and tl.load(p_noop) != 0:
        return
    chunks = tl.cdiv(columns, BK)
    i_block = tl.program_id(0) // chunks
    i_column = tl.max_contiguous((tl.program_id(0) % chunks) * BK + tl.arange(0, BK), V)
    m_column = i_column < columns
    first, end, group = find_block(p_ends, groups, rows, i_block, B, BG)
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
            largest = tl.maximum(largest, _largest_rotated(x))
        # The largest of rounded values is the largest value, rounded.  Bits of floats that are
        # not negative are ordered as the floats are.
        bits = narrow(largest).to(tl.int32, bitcast=True)
        p_group = p_amax + tl.cast(group, tl.int64) * columns
        tl.atomic_max(p_group + i_column, bits, mask=m_column, sem="relaxed")


def rotated_column_amax(
    x_MK: Tensor,
    rotation_BB: Tensor,
    ends_G: Tensor | None = None,
    *,
    noop: Tensor | None = None,
) -> Tensor:
    """Largest magnitude of each column after :func:`rotate`, ``(1, K)`` or ``(G, K)``.

    ``rotation_BB`` is ``hadamard_matrix``, whose signs are compiled into the kernel.
    """
    x_MK = unit_columns(x_MK)
    rows, columns = x_MK.shape
    groups = group_number(ends_G)
    amax_GK = torch.zeros(groups, columns, dtype=torch.int32, device=x_MK.device)
    B, BK, warps = _FEW if rows < groups * 2 * _MANY[0] else _MANY
    BK = min(BK, max(32, next_power_of_2(columns)))
    tile: dict[str, Any] = {"B": B, "BK": BK, "V": _COLUMNS_A_THREAD, "num_warps": warps}
    programs = block_count(rows, ends_G, B) * ceil_div(columns, BK)
    if programs:
        _rotated_amax_kernel[(programs,)](
            x_MK,
            amax_GK,
            None if ends_G is None else ends_G.contiguous(),
            noop,
            groups,
            rows,
            columns,
            x_MK.stride(0),
            **tile,
            BG=next_power_of_2(groups),
            # A quarter is exact, a sum is rounded: one may not be added to the other unrounded.
            enable_fp_fusion=False,
        )
    return amax_GK.view(torch.float32)
