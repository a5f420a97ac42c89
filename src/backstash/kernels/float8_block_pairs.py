"""Blocks of 128 down columns, and along rows as well, of bfloat16 values with powers of two.

What ``float8_block`` does for any values, with two of them in a word of 32 bits: a program has
128 rows of 128 columns in its registers.  Where groups are small most blocks are ragged, and a
program has the same number of values all the same: 64 rows of 256 columns, or 32 of 512, and
its neighbours have nothing to do.

Letters: M rows, K columns, G groups, S blocks of rows, C blocks of columns, W words of a row.
"""

# What is known when a kernel is compiled has a type that this checker takes for Python's.
# pyright: reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.blocks import block_count, block_table, group_number, locate_block
from backstash.kernels.cast.exponents import multiplier_of
from backstash.kernels.cast.pairs import are_words, codes_of, larger_pair, magnitudes, scaled_pair
from backstash.kernels.cast.scales import Scaling, exponent_for
from backstash.kernels.launches import Launcher
from backstash.kernels.sizes import ceil_div

_BLOCK = 128
# Words of a thread side by side, and warps: for columns alone, and for both directions.
_COLUMNS: dict[str, Any] = {"V": 4, "num_warps": 2, "maxnreg": 168}
_BOTH: dict[str, Any] = {"V": 8, "num_warps": 4}


@triton.jit
def _quantize_strip(
    p_x,
    p_row_codes,
    p_row_scale_inv,
    p_codes,
    p_column_scale_inv,
    first,
    count,
    i_block,
    i_chunk,
    words,
    row_stride,
    largest,
    epsilon,
    value_for_inf,
    B: tl.constexpr,
    N: tl.constexpr,
    E5M2: tl.constexpr,
    V: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """The first ``count`` of B rows from ``first``, of N chunks of 128 columns."""
    chunks = tl.cdiv(words, 64)
    o_row = tl.arange(0, B).to(OFFSET)
    i_word = tl.max_contiguous(i_chunk * 64 + tl.arange(0, N * 64), V)
    m_row = (o_row < count)[:, None]
    mask = m_row & (i_word < words)[None, :]
    first = first.to(tl.int64)
    p_tile = p_x + first * row_stride + (o_row[:, None] * row_stride + i_word[None, :])
    pair = tl.load(p_tile, mask=mask, other=0)
    o_tile = first * words + (o_row[:, None] * words + i_word[None, :])
    if p_row_codes is not None:
        parts = pair if N == 1 else tl.reshape(pair, [B, N, 64])
        low, high = magnitudes(tl.reduce(parts, 1 if N == 1 else 2, larger_pair))
        # The maximum with a NaN is the other operand: a NaN does not count.
        exponent = exponent_for(tl.maximum(tl.maximum(low, high), epsilon), largest, value_for_inf)
        if N == 1:
            p_row = p_row_scale_inv + (first + o_row) * chunks + i_chunk
            tl.store(p_row, multiplier_of(exponent), mask=o_row < count)
            exponent = exponent[:, None]
        else:
            i_slice = i_chunk + tl.arange(0, N)
            p_row = p_row_scale_inv + (first + o_row)[:, None] * chunks + i_slice[None, :]
            tl.store(p_row, multiplier_of(exponent), mask=m_row & (i_slice < chunks)[None, :])
            exponent = tl.broadcast_to(exponent[:, :, None], [B, N, 64])
            exponent = tl.reshape(exponent, [B, N * 64])
        codes = codes_of(scaled_pair(pair, exponent, exponent), E5M2)
        tl.store(p_row_codes + o_tile, codes, mask=mask)
    low, high = magnitudes(tl.reduce(pair, 0, larger_pair))
    low = exponent_for(tl.maximum(low, epsilon), largest, value_for_inf)
    high = exponent_for(tl.maximum(high, epsilon), largest, value_for_inf)
    codes = codes_of(scaled_pair(pair, low[None, :], high[None, :]), E5M2)
    tl.store(p_codes + o_tile, codes, mask=mask)
    i_column = i_chunk * 128 + tl.arange(0, N * 128)
    p_block = p_column_scale_inv + tl.cast(i_block, tl.int64) * (words * 2) + i_column
    inverse = tl.interleave(multiplier_of(low), multiplier_of(high))
    tl.store(p_block, inverse, mask=i_column < words * 2)


@triton.jit
def _quantize_pairs_kernel(
    p_x,
    p_row_codes,
    p_row_scale_inv,
    p_codes,
    p_column_scale_inv,
    p_table,
    p_noop,
    groups,
    rows,
    words,
    row_stride,
    largest,
    epsilon,
    value_for_inf,
    E5M2: tl.constexpr,
    V: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Codes down columns; and, with a place for them, those along rows of 128."""
    if p_noop is not None and tl.load(p_noop) != 0:
        return
    chunks = tl.cdiv(words, 64)
    i_block = tl.program_id(0) // chunks
    i_chunk = tl.program_id(0) % chunks
    first, end, group = locate_block(p_table, rows, i_block, 128)
    count = end - first
    if group < groups:
        if count > 64:
            _quantize_strip(
                p_x, p_row_codes, p_row_scale_inv, p_codes, p_column_scale_inv, first, count,
                i_block, i_chunk, words, row_stride, largest, epsilon, value_for_inf,
                128, 1, E5M2, V, OFFSET,
            )  # fmt: skip
        elif count > 32:
            if i_chunk % 2 == 0:
                _quantize_strip(
                    p_x, p_row_codes, p_row_scale_inv, p_codes, p_column_scale_inv, first, count,
                    i_block, i_chunk, words, row_stride, largest, epsilon, value_for_inf,
                    64, 2, E5M2, V, OFFSET,
                )  # fmt: skip
        elif i_chunk % 4 == 0:
            _quantize_strip(
                p_x, p_row_codes, p_row_scale_inv, p_codes, p_column_scale_inv, first, count,
                i_block, i_chunk, words, row_stride, largest, epsilon, value_for_inf,
                32, 4, E5M2, V, OFFSET,
            )  # fmt: skip
    elif i_chunk % 4 == 0:
        # A block that no group needs reads nothing; its scales are written as zeros.
        i_column = i_chunk * 128 + tl.arange(0, 512)
        p_block = p_column_scale_inv + tl.cast(i_block, tl.int64) * (words * 2) + i_column
        tl.store(p_block, tl.zeros([512], tl.float32), mask=i_column < words * 2)


_write_codes = Launcher(_quantize_pairs_kernel)


def are_pairs(x_MK: Tensor, outputs: Sequence[Tensor | None], scaling: Scaling) -> bool:
    """Whether values, codes and scales are what :func:`quantize_pairs` is for."""
    if scaling[3] is not None or not are_words(x_MK):
        return False
    return all(y is None or y.data_ptr() % 16 == 0 for y in outputs)


def quantize_pairs(
    x_MK: Tensor,
    outputs: tuple[Tensor | None, Tensor | None, Tensor, Tensor],
    ends_G: Tensor | None,
    scaling: Scaling,
    noop: Tensor | None,
) -> None:
    """Fill codes and inverse scales along rows, if asked for, and those down columns."""
    x_MW = x_MK.view(torch.int32)
    rows, words = x_MW.shape
    row_codes, row_scale_inv, codes, column_scale_inv = outputs
    largest, epsilon, value_for_inf, _ = scaling
    # The first row of a program is addressed in 64 bits; its others, from there, in fewer.
    offset: Any = tl.int32 if (_BLOCK + 1) * max(x_MW.stride(0), words) < 2**31 else tl.int64
    tile = {
        "E5M2": codes.dtype == torch.float8_e5m2,
        "OFFSET": offset,
        **(_COLUMNS if row_codes is None else _BOTH),
    }
    programs = block_count(rows, ends_G, _BLOCK) * ceil_div(words, _BLOCK // 2)
    if programs:
        _write_codes(
            programs,
            x_MW,
            None if row_codes is None else row_codes.view(torch.int16),
            row_scale_inv,
            codes.view(torch.int16),
            column_scale_inv,
            block_table(ends_G, rows, _BLOCK),
            noop,
            group_number(ends_G),
            rows,
            words,
            x_MW.stride(0),
            largest,
            epsilon,
            value_for_inf,
            **tile,
        )
