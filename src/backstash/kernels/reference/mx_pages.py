"""Values in pages as MXFP8: half the bytes of bfloat16, and lossy.

Each page stands alone: first the codes of its values, then an exponent for every block of 32.
A block is 32 neighbours of the flat buffer, and codes and exponents are those of
:func:`~backstash.kernels.reference.cast.quantize_mx_rows`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backstash.kernels.reference.cast import MX_BLOCK, dequantize_mx_rows, quantize_mx_rows

#: A program of the fast twin takes at most so many blocks at once, so a page holds a multiple.
MOST_BLOCKS_AT_ONCE = 64


def mx_page_blocks(page_bytes: int) -> tuple[int, int]:
    """How many blocks a page holds, and how many of them a program takes at once."""
    fitting = page_bytes // (MX_BLOCK + 1)
    at_once = min(MOST_BLOCKS_AT_ONCE, 1 << max(fitting.bit_length() - 1, 0))
    return fitting // at_once * at_once, at_once


def mx_page_values(page_bytes: int) -> int:
    """How many values a page holds; none if it is smaller than a block and its exponent."""
    return mx_page_blocks(page_bytes)[0] * MX_BLOCK


def mx_pages_of(values: Tensor, page_bytes: int) -> Tensor:
    """The bytes of whole pages that hold ``values``, of one dimension."""
    per_page = mx_page_values(page_bytes)
    blocks, count = per_page // MX_BLOCK, -(-values.numel() // per_page)
    padded = values.new_zeros(count * per_page)
    padded[: values.numel()] = values
    codes, exponents = quantize_mx_rows(padded.view(-1, MX_BLOCK))
    content = codes.new_zeros(count, page_bytes)
    content[:, :per_page] = codes.view(count, per_page)
    content[:, per_page : per_page + blocks] = exponents.view(count, blocks)
    return content.view(-1)


def mx_values_of(content: Tensor, dtype: torch.dtype, page_bytes: int) -> Tensor:
    """All values that whole pages have room for, rounded once to ``dtype``."""
    per_page = mx_page_values(page_bytes)
    pages = content.view(-1, page_bytes)
    codes = pages[:, :per_page].reshape(-1, MX_BLOCK)
    exponents = pages[:, per_page : per_page + per_page // MX_BLOCK].reshape(-1, 1)
    return dequantize_mx_rows(codes, exponents, dtype).view(-1)
