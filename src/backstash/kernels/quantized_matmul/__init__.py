"""Products on codes on a GPU: the twins of ``backstash.kernels.reference.quantized_mm``.

Both operands are read as they are kept, a byte a value or half of one, and no dequantized copy
reaches memory.  What a format's blocks mean to a matrix unit is in the file of the format; what
all share, where a tile and its operands lie, is in ``places``.
Where no kernel fits (operands of two formats, tiles on the left, float64) the reference runs.

Letters: T rows of the buffer, K input features, N output features, G groups.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from backstash.kernels.blocks import block_count, block_table, group_number
from backstash.kernels.quantized_matmul.blocks import block_mm_kernel, turn_blocks
from backstash.kernels.quantized_matmul.mx import mx_mm_kernel
from backstash.kernels.quantized_matmul.nvfp4 import nvfp4_mm_kernel
from backstash.kernels.reference import quantized_mm as reference
from backstash.kernels.reference.hadamard import hadamard_matrix
from backstash.kernels.reference.quantized_mm import Blocks, Codes, check_dw, check_dx, check_mm
from backstash.kernels.tiles import groups_by_size
from backstash.kernels.transposition import transpose_codes

_BM, _BN = 128, 128
_MX_TILE = {"BK": 64, "num_warps": 8, "num_stages": 3}
# Ends are read this many at least, so that few numbers of groups need a kernel of their own.
_FEWEST_ENDS = 128
_BLOCK_TILE = {"num_warps": 8, "num_stages": 4}
_NVFP4_TILE = {"BK": 64, "num_warps": 8, "num_stages": 3}


def quantized_mm(x_TK: Codes, w_NK: Codes, ends_G: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply rows by a weight: ``y_TN = x_TK w_NK^T``, or each row by its group's weight."""
    if not _has_kernel(x_TK, w_NK, dtype):
        return reference.quantized_mm(x_TK, w_NK, ends_G, dtype)
    check_mm("quantized_mm", x_TK, w_NK, ends_G)
    columns = w_NK.shape[0] // max(group_number(ends_G), 1)
    return _mm_rows(x_TK, w_NK, ends_G, columns, dtype)


def quantized_mm_dx(dy_TN: Codes, w_NK: Codes, ends_G: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Give the gradient of the rows: ``dx_TK = dy_TN w_NK``, each row with its group's weight."""
    if not _has_kernel(dy_TN, w_NK, dtype):
        return reference.quantized_mm_dx(dy_TN, w_NK, ends_G, dtype)
    check_dx("quantized_mm_dx", dy_TN, w_NK, ends_G)
    if _is_blocks(w_NK):
        groups, (rows, columns) = group_number(ends_G), w_NK.shape
        turned = transpose_codes(
            w_NK.codes.contiguous().view(groups, rows // max(groups, 1), columns)
        )
        w_NK = w_NK._replace(codes=turned)
    return _mm_rows(dy_TN, w_NK, ends_G, w_NK.shape[1], dtype, is_dx=True)


def quantized_mm_dw(dy_TN: Codes, x_TK: Codes, ends_G: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Give the gradient of the weight: ``dw_NK = dy_TN^T x_TK``, or ``dw_GNK`` of each group."""
    if not _has_kernel(dy_TN, x_TK, dtype):
        return reference.quantized_mm_dw(dy_TN, x_TK, ends_G, dtype)
    check_dw("quantized_mm_dw", dy_TN, x_TK, ends_G)
    (rows, M), columns = dy_TN.shape, x_TK.shape[1]
    if _is_blocks(dy_TN):
        dy_TN = dy_TN._replace(codes=turn_blocks(dy_TN.codes, ends_G))
        x_TK = x_TK._replace(codes=turn_blocks(x_TK.codes, ends_G))
    groups = group_number(ends_G)
    shape = (M, columns) if ends_G is None else (groups, M, columns)
    dw = torch.empty(shape, dtype=dtype, device=x_TK.codes.device)
    tiles = groups * triton.cdiv(M, _BM) * triton.cdiv(columns, _BN)
    table = None if ends_G is None else groups_by_size(ends_G, rows)
    sizes = groups, rows, 0, M, columns, tiles
    _launch(dy_TN, x_TK, dw, (table, ends_G), sizes, {"IS_DW": True, "B_COLUMNS": True})
    return dw


def _mm_rows(
    a: Codes,
    w: Codes,
    ends_G: Tensor | None,
    columns: int,
    dtype: torch.dtype,
    *,
    is_dx: bool = False,
) -> Tensor:
    """Multiply each row by its group's matrix of ``columns`` columns."""
    rows, length = a.shape
    out = torch.empty(rows, columns, dtype=dtype, device=a.codes.device)
    tiles = block_count(rows, ends_G, _BM) * triton.cdiv(columns, _BN)
    sizes = group_number(ends_G), rows, length, 0, columns, tiles
    table = block_table(ends_G, rows, _BM)
    _launch(a, w, out, (table, None), sizes, {"IS_DW": False, "B_COLUMNS": is_dx})
    return out


def _launch(
    a: Codes,
    b: Codes,
    out: Tensor,
    tables: tuple[Tensor | None, ...],
    sizes: tuple[int, ...],
    product: dict[str, Any],
) -> None:
    """Start a program for each tile.

    ``tables`` are the table of tiles and the ends, ``sizes`` groups, rows, length, M, columns
    and tiles, ``product`` the constants that tell which product it is.
    """
    if out.numel() == 0:
        return
    if 0 in (a.codes.numel(), b.codes.numel()):
        out.zero_()
        return
    table, ends_G = tables
    tables = (table, None if ends_G is None else ends_G.contiguous())
    parts = [part for q in (a, b) for part in (q.codes, q.scales, q.amax) if part is not None]
    constants: dict[str, Any] = {
        **product,
        "TILES": b.blocks is Blocks.TILES,
        "BM": _BM,
        "BN": _BN,
        "BG": max(_FEWEST_ENDS, triton.next_power_of_2(sizes[0])),
    }
    kernel: Any
    if a.amax is not None and b.amax is not None:
        kernel = nvfp4_mm_kernel
        tables += (hadamard_matrix(out.device) if a.is_rotated else None,)
        sizes += (triton.cdiv(a.shape[1], 2), triton.cdiv(b.shape[1], 2))
        constants |= _NVFP4_TILE | {
            "A_LINES": a.amax.ndim == 2,
            "B_LINES": b.amax.ndim == 2,
        }
    elif _is_blocks(a):
        kernel, constants = block_mm_kernel, constants | _BLOCK_TILE
    else:
        kernel, constants = mx_mm_kernel, constants | _MX_TILE
    kernel[(sizes[5],)](
        *(part.contiguous() for part in parts),
        out,
        *tables,
        *sizes,
        **constants,
    )


def _has_kernel(a: Codes, b: Codes, dtype: torch.dtype) -> bool:
    """Whether both are of one format, and of a kind that the kernels know."""
    if dtype is torch.float64 or a.blocks is Blocks.TILES or a.scales.dtype is not b.scales.dtype:
        return False
    if a.amax is None or b.amax is None:
        return a.amax is b.amax
    # Rows that only one side mixed must be unmixed; pairs of columns are not pairs of rows.
    is_odd = a.blocks is Blocks.COLUMNS and b.blocks is Blocks.TILES
    return a.is_rotated is b.is_rotated and not is_odd


def _is_blocks(operand: Codes) -> bool:
    return operand.scales.dtype is torch.float32
