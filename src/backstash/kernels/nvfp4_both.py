"""NVFP4 along rows and down columns on a GPU, in one launch.

Each direction has its own best layout, so no program does both.  Programs of the two take
turns over the same rows at the same pace: what one has read from memory, the other finds in
the cache.

Letters: M rows, K columns, G groups, S blocks of 16 rows, C blocks of 16 columns.
"""

# What is known when a kernel is compiled has a type that this checker takes for Python's.
# pyright: reportArgumentType=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.blocks import group_number, unit_columns
from backstash.kernels.nvfp4 import along_rows, cast_options, new_rows
from backstash.kernels.nvfp4_columns import down_columns
from backstash.kernels.nvfp4_pairs import are_pairs
from backstash.kernels.nvfp4_parts import BLOCKS
from backstash.kernels.nvfp4_places import (
    are_words,
    column_table,
    column_width,
    new_columns,
    row_multiple,
)
from backstash.kernels.reference.into import Into, noop_of
from backstash.kernels.reference.nvfp4_columns import NVFP4_BLOCK
from backstash.kernels.sizes import ceil_div

# A program of each direction has as many values: 16 rows by 512, or 128 rows by 64 columns.
_ROW_BLOCKS, _COLUMNS, _COLUMNS_A_THREAD = 32, 64, 4


@triton.jit(do_not_specialize=["groups", "rows", "blocks"])
def _quantize_kernel(
    p_x,
    p_row_codes,
    p_row_scales,
    p_row_amax,
    p_codes,
    p_scales,
    p_amax,
    p_rotation,
    p_seed,
    p_table,
    p_noop,
    groups,
    rows,
    columns,
    blocks,
    row_width,
    width,
    row_stride,
    row_amax_stride,
    amax_stride,
    BC: tl.constexpr,
    NB: tl.constexpr,
    BK: tl.constexpr,
    V: tl.constexpr,
    WIDE: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    OFFSET: tl.constexpr,
    PAIRS: tl.constexpr,
):
    if p_noop is not None and tl.load(p_noop) != 0:
        return
    i_program = tl.program_id(0) // 2
    if tl.program_id(0) % 2 == 0:
        chunks = tl.cdiv(tl.cdiv(columns, 16), BC)
        i_rows = i_program // chunks
        if i_rows < blocks:
            if p_table is None:
                first = i_rows * 16
                end, group = tl.minimum(first + 16, rows), i_rows * 0
            else:
                first = tl.load(p_table + i_rows * 8)
                end = tl.load(p_table + i_rows * 8 + 1)
                group = tl.load(p_table + i_rows * 8 + 2)
            if first < end:
                along_rows(
                    p_x, p_row_codes, p_row_scales, None, p_row_amax, p_seed, first, end, group,
                    groups, columns, row_width, row_stride, row_amax_stride, i_rows,
                    i_program % chunks, 16, BC, 1, WIDE, ROW_WORDS, CANDIDATES, OFFSET, PAIRS,
                )  # fmt: skip
    elif i_program < tl.cdiv(blocks, NB) * tl.cdiv(columns, BK):
        chunks = tl.cdiv(columns, BK)
        down_columns(
            p_x, p_codes, p_scales, p_amax, p_rotation, p_seed, p_table, groups, rows, columns,
            blocks, width, row_stride, amax_stride, i_program // chunks, i_program % chunks, NB,
            BK, V, WORDS, CANDIDATES, PAIRS,
        )  # fmt: skip


def quantize_nvfp4_both(
    x_MK: Tensor,
    amax: tuple[Tensor, Tensor],
    ends_G: Tensor | None = None,
    rotation_BB: Tensor | None = None,
    seed: Tensor | None = None,
    *,
    four_over_six: bool = False,
    into: Into | None = None,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Codes and scales along rows, and those down columns; the transform is for columns."""
    x_MK = unit_columns(x_MK)
    rows, columns = x_MK.shape
    multiple, slices = row_multiple(rotation_BB), ceil_div(columns, NVFP4_BLOCK)
    if into is None:
        into = Into(new_rows(x_MK) + new_columns(x_MK, ends_G, multiple))
    outputs = into.buffers
    row_codes, row_scales, codes, scales_SK = outputs
    blocks, width = len(scales_SK), row_codes.shape[1]
    tile: dict[str, Any] = {
        "BC": _ROW_BLOCKS, "NB": BLOCKS.value, "BK": _COLUMNS, "V": _COLUMNS_A_THREAD
    }  # fmt: skip
    programs = max(
        blocks * ceil_div(slices, _ROW_BLOCKS),
        ceil_div(blocks, BLOCKS.value) * ceil_div(columns, _COLUMNS),
    )
    row_amax, column_amax = amax
    if programs:
        _quantize_kernel[(2 * programs,)](
            x_MK,
            row_codes,
            row_scales,
            row_amax,
            codes,
            scales_SK,
            column_amax.contiguous(),
            rotation_BB,
            seed,
            column_table(ends_G, rows, multiple),
            noop_of(into),
            group_number(ends_G),
            rows,
            columns,
            blocks,
            width,
            column_width(rows, ends_G, multiple),
            x_MK.stride(0),
            row_amax.stride(0) if row_amax.ndim == 2 else None,
            column_amax.shape[1] if column_amax.ndim == 2 else None,
            **tile,
            **cast_options(x_MK),
            ROW_WORDS=width % 8 == 0,
            WORDS=are_words(rows, ends_G, multiple),
            CANDIDATES=1 + four_over_six,
            PAIRS=are_pairs(x_MK, 1 + four_over_six),
        )
    return (row_codes, row_scales), (codes, scales_SK)
