"""Where the transposed codes of NVFP4 lie in their buffer, group by group.

A column of group g is ``width_g`` bytes, two rows each; the K columns of a group lie one
after another, the groups too.  ``width_g`` is half of the group's rows rounded up to a
*multiple*: 2 for whole bytes, 16 for whole blocks.  The host knows a bound for the sum, the
device the sum itself, which is how long the valid prefix of the buffer is.

Letters: M rows, K columns, G groups, S blocks of 16 rows, P = 8 bytes of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from backstash.kernels.reference.blocks import block_ends

NVFP4_BLOCK = 16
_PAIRS = NVFP4_BLOCK // 2


def nvfp4_column_bytes(rows: int, columns: int, groups: int | None, multiple: int) -> int:
    """Bytes of the buffer: enough for ``rows`` rows in any groups."""
    widest = (rows + (groups or 1) * (multiple - 1)) // multiple
    return columns * widest * (multiple // 2)


def nvfp4_column_ends(ends_G: Tensor, rows: int, columns: int, multiple: int) -> Tensor:
    """Running ends ``(G,)`` int64 of the groups counted in bytes of the buffer."""
    return block_ends(ends_G, rows, multiple) * (columns * (multiple // 2))


def group_factor(factor: Tensor, ends_G: Tensor | None, rows: int) -> Tensor:
    """The factor of each block of rows, ``(S, 1)`` or ``(S, K)``, from those of the groups.

    ``factor`` is ``(1,)`` or ``(G,)``, or ``(1, K)`` or ``(G, K)``; a block of no group has one.
    """
    factor = factor[:, None] if factor.ndim == 1 else factor
    if ends_G is None:
        return factor
    return torch.cat([factor, torch.ones_like(factor[:1])])[_block_groups(ends_G, rows)]


def pack_columns(bytes_SKP: Tensor, rows: int, ends_G: Tensor | None, multiple: int) -> Tensor:
    """The buffer, flat, from the bytes of each block and column; zero past the last group."""
    S, columns, _ = bytes_SKP.shape
    if ends_G is None:
        width = -(-rows // multiple) * multiple // 2
        return bytes_SKP.transpose(0, 1).flatten(1)[:, :width].flatten().contiguous()
    size = nvfp4_column_bytes(rows, columns, len(ends_G), multiple)
    byte_N = torch.arange(size, device=bytes_SKP.device)
    ends_bytes_G = nvfp4_column_ends(ends_G, rows, columns, multiple)
    group_N = torch.searchsorted(ends_bytes_G, byte_N, right=True)
    in_use_N = group_N < len(ends_G)
    group_N = group_N.clamp(max=len(ends_G) - 1)
    width_N = _widths(ends_G, rows, multiple)[group_N].clamp(min=1)
    within_N = byte_N - F.pad(ends_bytes_G, (1, 0))[group_N]
    pair_N = within_N % width_N
    block_N = F.pad(block_ends(ends_G, rows, NVFP4_BLOCK), (1, 0))[group_N] + pair_N // _PAIRS
    column_N = (within_N // width_N).clamp(max=max(columns - 1, 0))
    found_N = bytes_SKP[block_N.clamp(max=S - 1), column_N, pair_N % _PAIRS]
    return torch.where(in_use_N, found_N, 0)


def unpack_columns(
    codes: Tensor, blocks: tuple[int, ...], rows: int, ends_G: Tensor | None, multiple: int
) -> Tensor:
    """Bytes ``(S, K, P)`` of ``blocks`` = ``(S, K)``, with zeros where a block has no row."""
    S, columns = blocks
    if ends_G is None:
        codes_KN = codes.view(columns, -(-rows // multiple) * multiple // 2)
        codes_KN = F.pad(codes_KN, (0, S * _PAIRS - codes_KN.shape[1]))
        return codes_KN.unflatten(1, (S, _PAIRS)).transpose(0, 1)
    group_S = _block_groups(ends_G, rows)
    in_use_S = group_S < len(ends_G)
    group_S = group_S.clamp(max=len(ends_G) - 1)
    first_S = F.pad(block_ends(ends_G, rows, NVFP4_BLOCK), (1, 0))[group_S]
    block_S = torch.arange(S, device=codes.device)
    pair_SP = ((block_S - first_S) * _PAIRS)[:, None] + torch.arange(_PAIRS, device=codes.device)
    width_S = _widths(ends_G, rows, multiple)[group_S]
    starts_G = F.pad(nvfp4_column_ends(ends_G, rows, columns, multiple), (1, 0))
    column_K = torch.arange(columns, device=codes.device)
    start_SK = starts_G[group_S][:, None] + column_K * width_S[:, None]
    exists_SP = in_use_S[:, None] & (pair_SP < width_S[:, None])
    byte_SKP = start_SK[..., None] + pair_SP[:, None]
    byte_SKP = torch.where(exists_SP[:, None], byte_SKP, len(codes))
    return F.pad(codes, (0, 1))[byte_SKP]


def _block_groups(ends_G: Tensor, rows: int) -> Tensor:
    """The group ``(S,)`` of each block of rows; G for one that no group uses."""
    block_S = torch.arange(-(-rows // NVFP4_BLOCK) + len(ends_G), device=ends_G.device)
    return torch.searchsorted(block_ends(ends_G, rows, NVFP4_BLOCK), block_S, right=True)


def _widths(ends_G: Tensor, rows: int, multiple: int) -> Tensor:
    """Bytes ``(G,)`` of one column of each group."""
    units_G = block_ends(ends_G, rows, multiple)
    return units_G.diff(prepend=units_G.new_zeros(1)) * (multiple // 2)
