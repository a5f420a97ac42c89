"""The random Hadamard transform: sixteen rows mixed so that one large value is spread out.

Sixteen values down a column, as a row vector, times ``R = diag(signs) H16``, where H16 is
Sylvester's matrix over 4.  ``R R^T = I``, so a product over the rows of two matrices that
were both transformed is the product of the matrices.  Values are rounded to bfloat16 before
and after.  Between, H16 is two of H8 over the sums and the differences of the upper and the
lower eight, and so on: four times sixteen additions in float32, of values that have their
sign and are a quarter already.

Letters: S blocks of rows, B = 16 rows of a block, K columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backstash.kernels.reference.blocks import block_ends, column_amax, cut_rows
from backstash.kernels.reference.into import unless

_SIZE = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def hadamard_matrix(device: torch.device) -> Tensor:
    """``R`` as bfloat16 ``(16, 16)``; its entries are a quarter, with a sign."""
    i_B = torch.arange(_SIZE, device=device)
    # Sylvester's sign is that of the bits which row and column number have in common.
    common = i_B[:, None] & i_B
    parity = (common ^ common >> 2) & 3
    parity = (parity ^ parity >> 1) & 1
    # The signs as the bits of one number: a captured graph cannot copy a list to the device.
    minus = sum(1 << i for i, sign in enumerate(SIGNS) if sign < 0)
    minus_B = torch.full((_SIZE,), minus, device=device) >> i_B & 1
    return (0.25 - 0.5 * (parity ^ minus_B[:, None])).to(torch.bfloat16)


def rotate(x_SBK: Tensor, rotation_BB: Tensor) -> Tensor:
    """``y[s, j, k] = sum_i x[s, i, k] R[i, j]`` of bfloat16 values, as float32."""
    # With a zero added no zero is negative, and zeros stay zeros.
    return _round(_mix(_round(x_SBK.float()) * (_signs(rotation_BB) * 0.25) + 0.0))


def rotate_back(y_SBK: Tensor, rotation_BB: Tensor) -> Tensor:
    """``x[s, i, k] = sum_j y[s, j, k] R[i, j]`` in float32."""
    x_SBK = _mix(y_SBK * 0.25)
    return torch.where(_signs(rotation_BB) < 0, 0.0 - x_SBK, x_SBK)


def rotated_column_amax(
    x_MK: Tensor,
    rotation_BB: Tensor,
    ends_G: Tensor | None = None,
    *,
    noop: Tensor | None = None,
) -> Tensor:
    """Largest magnitude of each column after :func:`rotate`, ``(1, K)`` or ``(G, K)``.

    Where the device's ``noop`` is set (see :class:`Into`), nothing is read and all are zero.
    """
    rotated_SBK = rotate(cut_rows(x_MK, _SIZE, ends_G), rotation_BB)
    ends_rows_G = None if ends_G is None else block_ends(ends_G, len(x_MK), _SIZE) * _SIZE
    return unless(noop, column_amax(rotated_SBK.flatten(0, 1), ends_rows_G))


def _round(x: Tensor) -> Tensor:
    """The nearest bfloat16 of each float32, as float32."""
    # By its bits: a compiler may leave out a cast to bfloat16 that is followed by one back.
    bits = x.view(torch.int32)
    bits = bits + 0x7FFF + (bits >> 16 & 1) & -0x10000
    return torch.where(x.isnan(), torch.nan, bits.view(torch.float32))


def _signs(rotation_BB: Tensor) -> Tensor:
    """The signs ``(B, 1)`` of the rows: the first column of Sylvester's matrix has none."""
    return rotation_BB[:, :1].float().sign()


def _mix(x_SBK: Tensor) -> Tensor:
    """Sylvester's sums and differences of sixteen rows, by halves."""
    half = _SIZE // 2
    while half:
        upper, lower = x_SBK.unflatten(1, (-1, 2, half)).unbind(2)
        x_SBK = torch.stack([upper + lower, upper - lower], dim=2).flatten(1, 3)
        half //= 2
    return x_SBK
