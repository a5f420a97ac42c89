"""Blocks of neighbouring values: where they lie, and how a matrix is cut into them.

Blocks along a row lie at equal places in every row.  Blocks of rows start anew in every
group, whose ends only the device knows; so the host makes room for as many as there can
be, ``ceil(M / B) + G``, and the device finds by a running sum which of them are in use.
That bound is one more than any groups can use, so the last block is always empty.

Letters: M rows, K columns, G groups, B rows or columns of a block, S blocks of rows, C blocks
of columns.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from backstash.kernels.reference.grouped_mm import row_groups

_NAN_CODE = 0x7F


def block_ends(ends_G: Tensor, rows: int, block: int) -> Tensor:
    """Running ends ``(G,)`` int64 of the groups counted in blocks of ``block`` rows."""
    ends_G = ends_G.long().clamp(max=rows)
    counts_G = ends_G.diff(prepend=ends_G.new_zeros(1))
    return ((counts_G + block - 1) // block).cumsum(0)


def block_rows(ends_G: Tensor, rows: int, block: int) -> Tensor:
    """Rows ``(S, B)`` of each block; ``rows`` where a block has none."""
    ends_G = ends_G.long().clamp(max=rows)
    starts_G = F.pad(ends_G[:-1], (1, 0))
    block_ends_G = block_ends(ends_G, rows, block)
    block_starts_G = F.pad(block_ends_G[:-1], (1, 0))
    block_S = torch.arange(-(-rows // block) + len(ends_G), device=ends_G.device)
    group_S = torch.searchsorted(block_ends_G, block_S, right=True)
    in_use_S = group_S < len(ends_G)
    group_S = group_S.clamp(max=len(ends_G) - 1)
    first_S = starts_G[group_S] + (block_S - block_starts_G[group_S]) * block
    rows_SB = first_S[:, None] + torch.arange(block, device=ends_G.device)
    exists_SB = in_use_S[:, None] & (rows_SB < ends_G[group_S][:, None])
    return torch.where(exists_SB, rows_SB, rows)


def row_places(
    ends_G: Tensor | None, rows: int, block: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The block ``(M,)`` of each row and its place in it; the tail is in the last block."""
    row_M = torch.arange(rows, device=device)
    if ends_G is None:
        return row_M // block, row_M % block
    ends_G = ends_G.long().clamp(max=rows)
    starts_G = F.pad(ends_G, (1, 0))
    block_starts_G = F.pad(block_ends(ends_G, rows, block), (1, 0))
    group_M = row_groups(ends_G, rows)
    within_M = row_M - starts_G[group_M]
    last = -(-rows // block) + len(ends_G) - 1
    block_M = (block_starts_G[group_M] + within_M // block).clamp(max=last)
    return torch.where(group_M < len(ends_G), block_M, last), within_M % block


def column_blocks(columns: int, block: int, device: torch.device) -> Tensor:
    """The block ``(K,)`` of each column."""
    return torch.arange(columns, device=device) // block


def cut_rows(x_MK: Tensor, block: int, ends_G: Tensor | None = None) -> Tensor:
    """Float32 ``(S, B, K)``: blocks of rows, with zeros where a block has no row."""
    x_MK = x_MK.float()
    if ends_G is None:
        missing = -x_MK.shape[0] % block
        return F.pad(x_MK, (0, 0, 0, missing)).unflatten(0, (-1, block))
    padded_MK = F.pad(x_MK, (0, 0, 0, 1))
    return padded_MK[block_rows(ends_G, len(x_MK), block)]


def cut_columns(x: Tensor, block: int) -> Tensor:
    """``(..., C, B)``: blocks of the last dimension, with zeros where a block has no column."""
    return F.pad(x, (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))


def valid(ends_G: Tensor, rows: int) -> Tensor:
    """Bool ``(M, 1)``: does a row belong to a group?"""
    return (torch.arange(rows, device=ends_G.device) < ends_G[-1])[:, None]


def row_factor(factor: Tensor, ends_G: Tensor | None, rows: int) -> Tensor:
    """Factors that fit a matrix of ``rows`` rows: each row has its group's, the tail one."""
    if ends_G is None:
        return factor
    of_row = torch.cat([factor, torch.ones_like(factor[:1])])[row_groups(ends_G, rows)]
    return of_row[:, None] if factor.ndim == 1 else of_row


def magnitude(x: Tensor) -> Tensor:
    """Float32 magnitudes; a NaN counts as zero, so that it spoils no scale."""
    magnitude = x.abs().float()
    return torch.where(magnitude.isnan(), 0.0, magnitude)


def row_amax(x_MK: Tensor) -> Tensor:
    """Largest magnitude of each row as float32 ``(M, 1)``; NaN is ignored."""
    if x_MK.numel() == 0:
        return x_MK.new_zeros(len(x_MK), 1, dtype=torch.float32)
    return magnitude(x_MK).amax(1, keepdim=True)


def column_amax(x_MK: Tensor, ends_G: Tensor | None = None) -> Tensor:
    """Largest magnitude of each column, or of each group's, as float32 ``(1, K)`` or ``(G, K)``.

    NaN is ignored, the tail is not read, and a group without rows has zeros.
    """
    columns = x_MK.shape[1]
    if ends_G is None:
        return magnitude(F.pad(x_MK, (0, 0, 0, 1))).amax(0, keepdim=True)
    group_MK = row_groups(ends_G, len(x_MK))[:, None].expand(-1, columns)
    amax_GK = x_MK.new_zeros(len(ends_G) + 1, columns, dtype=torch.float32)
    return amax_GK.scatter_reduce(0, group_MK, magnitude(x_MK), "amax")[:-1].clone()


def saturating_codes(values: Tensor, code_dtype: torch.dtype) -> Tensor:
    """Bytes of the nearest codes; a value past the largest code gets the largest code."""
    # Without the clamp a value past the largest code becomes NaN, not the largest code.
    largest = torch.finfo(code_dtype).max
    codes = values.clamp(-largest, largest).to(code_dtype).view(torch.uint8)
    # A NaN has one code whatever its sign: the sign of 0/0 differs from machine to machine.
    # Buffers are contiguous even where x was not: saving takes a prefix of rows as bytes.
    return torch.where(values.isnan(), _NAN_CODE, codes).contiguous()
