"""Products on codes on a GPU: the twins of ``backstash.kernels.reference.quantized_mm``.

Both operands are read as they are kept, a byte a value or half of one, and no dequantized copy
reaches memory.  What a format's blocks mean to a matrix unit is in the file of the format; what
all share, where a tile and its operands lie, is in ``places``.  Hopper GPUs have kernels of their
own, which decode while the tensor cores multiply, for matrices whose rows are whole units of the
copy engine.  Where no kernel fits (operands of two formats, tiles on the left, float64) the
reference runs.

Letters: T rows of the buffer, K input features, N output features, G groups, M rows of a result
that is a weight's gradient, C columns of a result.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from backstash.device import capability, processor_count
from backstash.kernels.blocks import block_count, block_table, group_number
from backstash.kernels.quantized_matmul.blocks import block_mm_kernel, turn_blocks
from backstash.kernels.quantized_matmul.mx import mx_mm_kernel
from backstash.kernels.quantized_matmul.nvfp4 import nvfp4_mm_kernel
from backstash.kernels.reference import quantized_mm as reference
from backstash.kernels.reference.hadamard import hadamard_matrix
from backstash.kernels.reference.quantized_mm import Blocks, Codes, check_dw, check_dx, check_mm
from backstash.kernels.sizes import ceil_div, next_power_of_2
from backstash.kernels.tiles import groups_by_size
from backstash.kernels.transposition import transpose_codes

try:
    from backstash.kernels.quantized_matmul.hopper import blocks_of, is_whole
    from backstash.kernels.quantized_matmul.hopper_blocks import hopper_block_kernel
    from backstash.kernels.quantized_matmul.hopper_mx import hopper_mx_kernel
    from backstash.kernels.quantized_matmul.hopper_nvfp4 import hopper_nvfp4_kernel

    _HAS_GLUON = True
except (ImportError, AttributeError):  # Gluon is new in Triton and still changes its names.
    _HAS_GLUON = False

_ROWS = 128
_MX_TILE = {"BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3}
_BLOCK_TILE = {"BN": 128, "num_warps": 8, "num_stages": 4}
_NVFP4_TILE = {"BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3}
_HOPPER_MX_TILE = {"BN": 256, "BK": 64, "STAGES": 4, "num_warps": 8}
_HOPPER_BLOCK_TILE = {"BN": 128, "STAGES": 4, "num_warps": 8}
_HOPPER_NVFP4_TILE = {"BN": 256, "BK": 64, "num_warps": 8}
_HOPPER = 9
# Ends are read this many at least, so that few numbers of groups need a kernel of their own.
_FEWEST_ENDS = 128


@dataclasses.dataclass(frozen=True)
class _Product:
    """What a launch needs to know besides its operands.

    Attributes:
        is_dw: The rows are added up, within each group.
        b_columns: Blocks of the right operand lie down columns.
        table: Where the tiles are: those of rows, or for ``dw`` of groups.
        ends_G: Ends of the groups, for ``dw``.
        strips: How many blocks of rows the tiles of the result have.
        sizes: Groups, rows T, the length that is added up (for ``dw`` 0), M and C.
    """

    is_dw: bool
    b_columns: bool
    table: Tensor | None
    ends_G: Tensor | None
    strips: int
    sizes: tuple[int, int, int, int, int]


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
    columns = w_NK.shape[1]
    if _is_blocks(w_NK):
        codes_GNK = w_NK.codes.contiguous().view(-1, dy_TN.shape[1], columns)
        w_NK = w_NK._replace(codes=transpose_codes(codes_GNK).flatten(0, 1))
    return _mm_rows(dy_TN, w_NK, ends_G, columns, dtype, is_dx=True)


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
    table = None if ends_G is None else groups_by_size(ends_G, rows)
    strips = groups * ceil_div(M, _ROWS)
    sizes = groups, rows, 0, M, columns
    _launch(dy_TN, x_TK, dw, _Product(True, True, table, ends_G, strips, sizes))
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
    table, strips = block_table(ends_G, rows, _ROWS), block_count(rows, ends_G, _ROWS)
    sizes = group_number(ends_G), rows, length, 0, columns
    _launch(a, w, out, _Product(False, is_dx, table, None, strips, sizes))
    return out


def _launch(a: Codes, b: Codes, out: Tensor, product: _Product) -> None:
    if out.numel() == 0:
        return
    if 0 in (a.codes.numel(), b.codes.numel()):
        out.zero_()
        return
    a, b = (q._replace(codes=q.codes.contiguous(), scales=q.scales.contiguous()) for q in (a, b))
    ends_G = None if product.ends_G is None else product.ends_G.contiguous()
    tables: tuple[Tensor | None, ...] = (product.table, ends_G)
    operands: list[Any] = [a.codes, b.codes, a.scales, b.scales]
    rest: tuple[int, ...] = ()
    constants: dict[str, Any] = {
        "IS_DW": product.is_dw,
        "B_COLUMNS": product.b_columns,
        "TILES": b.blocks is Blocks.TILES,
        "BM": _ROWS,
        "BG": max(_FEWEST_ENDS, next_power_of_2(product.sizes[0])),
    }
    kernel: Any
    if a.amax is not None and b.amax is not None:
        operands += [a.amax.contiguous(), b.amax.contiguous()]
        rest = ceil_div(a.shape[1], 2), ceil_div(b.shape[1], 2)
        constants |= {"A_LINES": a.amax.ndim == 2, "B_LINES": b.amax.ndim == 2}
        if (
            not product.is_dw
            and _is_hopper(a)
            and all(size % 32 == 0 for size in product.sizes[2:])
        ):
            kernel, tile, tables = hopper_nvfp4_kernel, _HOPPER_NVFP4_TILE, tables[:1]
            del constants["IS_DW"], constants["BG"]
        else:
            kernel, tile = nvfp4_mm_kernel, _NVFP4_TILE
            tables += (hadamard_matrix(out.device) if a.is_rotated else None,)
    elif _is_hopper(a) and is_whole(a.codes) and is_whole(b.codes):
        kernel, tile = (
            (hopper_block_kernel, _HOPPER_BLOCK_TILE)
            if _is_blocks(a)
            else (hopper_mx_kernel, _HOPPER_MX_TILE)
        )
        operands[:2] = _described(a, b, product, tile)
    elif _is_blocks(a):
        kernel, tile = block_mm_kernel, _BLOCK_TILE
    else:
        kernel, tile = mx_mm_kernel, _MX_TILE
    programs = tiles = product.strips * ceil_div(product.sizes[4], tile["BN"])
    if tile in (_HOPPER_MX_TILE, _HOPPER_BLOCK_TILE, _HOPPER_NVFP4_TILE):
        programs = min(tiles, processor_count(out.device))
    kernel[(programs,)](*operands, out, *tables, *product.sizes, tiles, *rest, **constants, **tile)


def _described(a: Codes, b: Codes, product: _Product, tile: dict[str, int]) -> list[Any]:
    """Both operands as the copy engine reads them, in blocks of a step."""
    BN, BK = tile["BN"], tile.get("BK", 128)
    if _is_blocks(a):
        return [blocks_of(_flat(a.codes), _ROWS, BK), blocks_of(_flat(b.codes), BN, BK)]
    of_a = (BK, _ROWS) if product.is_dw else (_ROWS, BK)
    of_b = (BK, BN) if product.b_columns else (BN, BK)
    return [blocks_of(a.codes, *of_a), blocks_of(b.codes, *of_b)]


def _flat(codes: Tensor) -> Tensor:
    return codes.flatten(0, -2)


def _has_kernel(a: Codes, b: Codes, dtype: torch.dtype) -> bool:
    """Whether both are of one format, and of a kind that the kernels know."""
    if dtype is torch.float64 or a.blocks is Blocks.TILES or a.scales.dtype is not b.scales.dtype:
        return False
    if a.amax is None or b.amax is None:
        return a.amax is b.amax
    # Rows that only one side mixed must be unmixed; pairs of columns are not pairs of rows.
    is_odd = a.blocks is Blocks.COLUMNS and b.blocks is Blocks.TILES
    return a.is_rotated is b.is_rotated and not is_odd


def _is_hopper(a: Codes) -> bool:
    """Whether there are kernels of Hopper's own for this GPU."""
    device = a.codes.device
    if not _HAS_GLUON or device.type != "cuda":
        return False
    return capability(device)[0] == _HOPPER


def _is_blocks(operand: Codes) -> bool:
    return operand.scales.dtype is torch.float32
