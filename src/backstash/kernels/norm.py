"""Normalizations on a GPU, one row at a time in registers: the twins of the reference.

Backward's gradients of weight and bias are sums over all rows.  A fixed number of programs
each add up every so-many-th row and write their sum; those few sums are added at the end, so
the order, and with it the result, is the same each time.

Letters: T rows, H features, P programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.blocks import unit_columns
from backstash.kernels.launches import Launcher
from backstash.kernels.reference import norm as reference
from backstash.kernels.reference.norm import check_norm, check_norm_gradient
from backstash.kernels.sizes import next_power_of_2

_PROGRAMS = 1024


@triton.jit
def _norm_kernel(
    p_x,
    p_weight,
    p_bias,
    p_y,
    p_mean,
    p_rstd,
    columns,
    x_stride,
    eps,
    BH: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    i_column = tl.arange(0, BH)
    mask = i_column < columns
    x = tl.load(p_x + i_row * x_stride + i_column, mask=mask, other=0).to(tl.float32)
    if p_mean is not None:
        mean = tl.sum(x, 0) / columns
        tl.store(p_mean + i_row, mean)
        x = tl.where(mask, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
    tl.store(p_rstd + i_row, rstd)
    y = x * rstd * tl.load(p_weight + i_column, mask=mask, other=0).to(tl.float32)
    if p_bias is not None:
        y += tl.load(p_bias + i_column, mask=mask, other=0).to(tl.float32)
    tl.store(p_y + i_row * columns + i_column, y.to(p_y.dtype.element_ty), mask=mask)


@triton.jit
def _norm_backward_kernel(
    p_dy,
    p_x,
    p_weight,
    p_mean,
    p_rstd,
    p_dx,
    p_dweight,
    p_dbias,
    rows,
    columns,
    dy_stride,
    x_stride,
    BH: tl.constexpr,
):
    i_program = tl.program_id(0).to(tl.int64)
    i_column = tl.arange(0, BH)
    mask = i_column < columns
    weight = tl.load(p_weight + i_column, mask=mask, other=0).to(tl.float32)
    dweight = tl.zeros([BH], tl.float32)
    dbias = tl.zeros([BH], tl.float32)
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        i_row = tl.cast(i, tl.int64)
        x = tl.load(p_x + i_row * x_stride + i_column, mask=mask, other=0).to(tl.float32)
        dy = tl.load(p_dy + i_row * dy_stride + i_column, mask=mask, other=0).to(tl.float32)
        rstd = tl.load(p_rstd + i_row)
        if p_mean is not None:
            x = tl.where(mask, x - tl.load(p_mean + i_row), 0.0)
            dbias += dy
        unit = x * rstd
        dunit = dy * weight
        # What moves a row's mean or scale has no effect on the normalized row.
        free = dunit - unit * (tl.sum(dunit * unit, 0) / columns)
        if p_mean is not None:
            free -= tl.sum(dunit, 0) / columns
        dweight += dy * unit
        dx = (free * rstd).to(p_dx.dtype.element_ty)
        tl.store(p_dx + i_row * columns + i_column, dx, mask=mask)
    tl.store(p_dweight + i_program * columns + i_column, dweight, mask=mask)
    if p_dbias is not None:
        tl.store(p_dbias + i_program * columns + i_column, dbias, mask=mask)


_norm = Launcher(_norm_kernel)
_norm_backward = Launcher(_norm_backward_kernel)


def layer_norm(
    x_TH: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Shift and scale each row to mean zero and variance one, then apply weight and bias."""
    if x_TH.dtype is torch.float64:
        return reference.layer_norm(x_TH, weight_H, bias_H, eps)
    check_norm("layer_norm", x_TH, weight_H, bias_H)
    mean_T = _statistic(x_TH)
    y_TH, rstd_T = _forward(x_TH, weight_H, bias_H, mean_T, eps)
    return y_TH, mean_T, rstd_T


def layer_norm_backward(
    dy_TH: Tensor, x_TH: Tensor, weight_H: Tensor, mean_T: Tensor, rstd_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Give :func:`layer_norm`'s gradients ``dx_TH``, ``dweight_H`` and ``dbias_H``."""
    if x_TH.dtype is torch.float64:
        return reference.layer_norm_backward(dy_TH, x_TH, weight_H, mean_T, rstd_T)
    check_norm("layer_norm_backward", x_TH, weight_H, None)
    check_norm_gradient("layer_norm_backward", dy_TH, x_TH)
    dbias_PH = _sums(x_TH)
    dx_TH, dweight_H = _backward(dy_TH, x_TH, weight_H, (mean_T, rstd_T), dbias_PH)
    return dx_TH, dweight_H, dbias_PH.sum(0).to(weight_H.dtype)


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Scale each row to mean square one, then apply the weight."""
    if x_TH.dtype is torch.float64:
        return reference.rms_norm(x_TH, weight_H, eps)
    check_norm("rms_norm", x_TH, weight_H, None)
    return _forward(x_TH, weight_H, None, None, eps)


def rms_norm_backward(
    dy_TH: Tensor, x_TH: Tensor, weight_H: Tensor, rstd_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Give :func:`rms_norm`'s gradients ``dx_TH`` and ``dweight_H``."""
    if x_TH.dtype is torch.float64:
        return reference.rms_norm_backward(dy_TH, x_TH, weight_H, rstd_T)
    check_norm("rms_norm_backward", x_TH, weight_H, None)
    check_norm_gradient("rms_norm_backward", dy_TH, x_TH)
    return _backward(dy_TH, x_TH, weight_H, (None, rstd_T), None)


def _forward(
    x_TH: Tensor, weight_H: Tensor, bias_H: Tensor | None, mean_T: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    x_TH = unit_columns(x_TH)
    rows, columns = x_TH.shape
    y_TH = torch.empty(rows, columns, dtype=x_TH.dtype, device=x_TH.device)
    rstd_T = _statistic(x_TH)
    if rows and columns:
        _norm(
            rows,
            x_TH,
            weight_H.contiguous(),
            None if bias_H is None else bias_H.contiguous(),
            y_TH,
            mean_T,
            rstd_T,
            columns,
            x_TH.stride(0),
            eps,
            **_tile(x_TH),
        )
    return y_TH, rstd_T


def _backward(
    dy_TH: Tensor,
    x_TH: Tensor,
    weight_H: Tensor,
    statistics: tuple[Tensor | None, Tensor],
    dbias_PH: Tensor | None,
) -> tuple[Tensor, Tensor]:
    mean_T, rstd_T = statistics
    dy_TH, x_TH = unit_columns(dy_TH), unit_columns(x_TH)
    rows, columns = x_TH.shape
    dx_TH = torch.empty(rows, columns, dtype=x_TH.dtype, device=x_TH.device)
    dweight_PH = _sums(x_TH)
    if rows and columns:
        _norm_backward(
            dweight_PH.shape[0],
            dy_TH,
            x_TH,
            weight_H.contiguous(),
            None if mean_T is None else mean_T.contiguous(),
            rstd_T.contiguous(),
            dx_TH,
            dweight_PH,
            dbias_PH,
            rows,
            columns,
            dy_TH.stride(0),
            x_TH.stride(0),
            **_tile(x_TH),
        )
    return dx_TH, dweight_PH.sum(0).to(weight_H.dtype)


def _statistic(x_TH: Tensor) -> Tensor:
    return torch.empty(x_TH.shape[0], dtype=torch.float32, device=x_TH.device)


def _sums(x_TH: Tensor) -> Tensor:
    """Room for each program's sum over its rows; without rows there is no program."""
    programs = min(_PROGRAMS, x_TH.shape[0]) if x_TH.shape[1] else 0
    return torch.empty(programs, x_TH.shape[1], dtype=torch.float32, device=x_TH.device)


def _tile(x_TH: Tensor) -> dict[str, Any]:
    BH = next_power_of_2(x_TH.shape[1])
    return {
        "BH": BH,
        # About sixteen values a thread.
        "num_warps": min(32, max(1, BH // 512)),
    }
