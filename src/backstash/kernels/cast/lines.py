"""Lines of a row that share a float32 scale: each 128 neighbours, or all of a row.

A program has some lines in its registers: it finds the largest value of each and casts what
it has, so that every value is read once.

Letters: M rows, K columns, C lines of a row, L values of a line, B rows of a program.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.blocks import unit_columns
from backstash.kernels.cast.scales import Scaling, scale_of
from backstash.kernels.launches import Launcher
from backstash.kernels.reference.cast import FLOAT32_MAX
from backstash.kernels.sizes import ceil_div, next_power_of_2

#: The longest line that fits the registers of a program.
LONGEST_LINE = 16384
# Values of a program where lines are short, and of a thread.
_TILE, _VALUES = 4096, 32
_MOST_LINES = 8


@triton.jit
def _quantize_lines_kernel(
    p_x,
    p_codes,
    p_scale_inv,
    p_noop,
    rows,
    columns,
    lines,
    row_stride,
    largest,
    epsilon,
    value_for_inf,
    exact,
    B: tl.constexpr,
    BC: tl.constexpr,
    L: tl.constexpr,
):
    """Codes and inverse scales of B rows; without codes, the largest values alone."""
    if p_noop is not None and tl.load(p_noop) != 0:
        return
    chunks = tl.cdiv(lines, BC)
    i_row = (tl.program_id(0) // chunks).to(tl.int64) * B + tl.arange(0, B)
    i_line = (tl.program_id(0) % chunks) * BC + tl.arange(0, BC)
    i_column = i_line[:, None] * L + tl.arange(0, L)[None, :]
    mask = (i_row < rows)[:, None, None] & (i_column < columns)[None, :, :]
    p_tile = p_x + i_row[:, None, None] * row_stride + i_column[None, :, :]
    x = tl.load(p_tile, mask=mask, other=0).to(tl.float32)
    # The maximum with a NaN is the other operand: a NaN does not count.
    amax = tl.maximum(tl.max(tl.abs(x), 2), 0.0)
    p_line = p_scale_inv + i_row[:, None] * lines + i_line[None, :]
    m_line = (i_row < rows)[:, None] & (i_line < lines)[None, :]
    if p_codes is None:
        tl.store(p_line, amax, mask=m_line)
    else:
        scale, inverse = scale_of(amax, largest, epsilon, value_for_inf, exact)
        codes = (x * scale[:, :, None]).to(p_codes.dtype.element_ty)
        tl.store(p_codes + i_row[:, None, None] * columns + i_column[None, :, :], codes, mask=mask)
        tl.store(p_line, inverse, mask=m_line)


_quantize = Launcher(_quantize_lines_kernel)


def quantize_lines(
    x_MK: Tensor,
    length: int,
    codes_MK: Tensor,
    scale_inv_MC: Tensor,
    scaling: Scaling,
    noop: Tensor | None,
) -> None:
    """Fill the codes and the inverse scales, ``(M, C)``, of lines of ``length`` values."""
    _over_lines(x_MK, length, codes_MK, scale_inv_MC, scaling, noop)


def line_amax(x_MK: Tensor, length: int) -> Tensor:
    """The largest magnitude of each line, float32 ``(M, C)``; NaN is ignored."""
    shape = len(x_MK), ceil_div(x_MK.shape[1], length)
    amax_MC = torch.empty(shape, dtype=torch.float32, device=x_MK.device)
    _over_lines(x_MK, length, None, amax_MC, (1.0, 0.0, FLOAT32_MAX, None), None)
    return amax_MC


def _over_lines(
    x_MK: Tensor,
    length: int,
    codes_MK: Tensor | None,
    result_MC: Tensor,
    scaling: Scaling,
    noop: Tensor | None,
) -> None:
    x_MK = unit_columns(x_MK)
    rows, columns = x_MK.shape
    lines = result_MC.shape[1]
    L = next_power_of_2(length)
    BC = min(_MOST_LINES, next_power_of_2(max(1, lines)))
    B = max(1, _TILE // (BC * L)) if lines > 1 or L < _TILE // 4 else 1
    warps = min(16, max(1, B * BC * L // (32 * _VALUES)))
    tile: dict[str, Any] = {"B": B, "BC": BC, "L": L, "num_warps": warps}
    programs = ceil_div(rows, B) * ceil_div(lines, BC)
    if programs:
        _quantize(
            programs,
            x_MK,
            codes_MK,
            result_MC,
            noop,
            rows,
            columns,
            lines,
            x_MK.stride(0),
            *scaling,
            **tile,
        )
