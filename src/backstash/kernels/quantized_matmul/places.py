"""Where a tile of a product on codes lies: in the result, in its operands, in their scales.

A product adds up ``a_MJ b_CJ^T`` over J.  For ``y`` and ``dx`` the rows M are those of the
buffer, cut by the table of :mod:`backstash.kernels.blocks`, and b is the weight of their group.
For ``dw`` the rows that are added up are those of a group; the table of
:mod:`backstash.kernels.tiles` has the longest group first.  A tile starts on a block of both
its sides, so what a tile needs of codes and scales is one rectangle each.

Letters: T rows of the buffer, G groups, M rows and C columns of a result, J what is added up
over, B values of a block, BM and BN rows and columns of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from backstash.kernels.blocks import group_rows, locate_block


@triton.jit
def row_tile(p_table, i_tile, groups, rows, length, columns, BM: tl.constexpr, BN: tl.constexpr):
    """Of ``y`` or ``dx``: first row, rows to write, group, first column, and what to add up.

    The tail adds up nothing, and so is written as zeros; its weight is that of the last group.
    """
    chunks = tl.cdiv(columns, BN)
    first, end, group = locate_block(p_table, rows, i_tile // chunks, BM)
    length = tl.where(group < groups, length, 0)
    left, group = end - first, tl.minimum(group, groups - 1)
    first, group = tl.cast(first, tl.int64), tl.cast(group, tl.int64)
    return first, left, group, (i_tile % chunks) * BN, length


@triton.jit
def group_tile(p_table, i_tile, rows, M, columns, BM: tl.constexpr, BN: tl.constexpr):
    """Of ``dw``: first row, rows to add up, group, and the tile's first row and column."""
    chunks = tl.cdiv(columns, BN)
    i_strip = i_tile // chunks
    if p_table is None:
        first, end, group = i_tile * 0, rows, i_tile * 0
        m0 = i_strip * BM
    else:
        strips = tl.cdiv(M, BM)
        first = tl.load(p_table + (i_strip // strips) * 4)
        end = tl.load(p_table + (i_strip // strips) * 4 + 1)
        group = tl.load(p_table + (i_strip // strips) * 4 + 2)
        m0 = (i_strip % strips) * BM
    return first, end - first, group, m0, (i_tile % chunks) * BN


@triton.jit
def units_before(p_ends, rows, group, UNIT, BG: tl.constexpr):
    """How many blocks of UNIT rows all groups before ``group`` have, as 64 bits."""
    if p_ends is None:
        units = group * 0  # there is one group
    else:
        i_group = tl.arange(0, BG)
        starts, ends = group_rows(p_ends, i_group, i_group < group, rows)
        units = tl.sum((tl.maximum(ends - starts, 0) + UNIT - 1) // UNIT, 0)
    return tl.cast(units, tl.int64)


@triton.jit
def row_offsets(row, scale_row, length, TILES, B):
    """Where codes and scales of an operand with blocks along rows begin, from ``row``."""
    blocks = tl.cdiv(length, B)
    scales = scale_row * blocks if TILES else row * blocks
    return row * length, scales


@triton.jit
def column_offsets(row, block, first, columns, TILES, B):
    """The same of one with blocks down columns, from column ``first`` of row ``row``."""
    scales = block * tl.cdiv(columns, B) + first // B if TILES else block * columns + first
    return row * columns + first, scales


@triton.jit
def load_codes(p_codes, ld, m_line, m_j, COLUMNS, B: tl.constexpr, BK):
    """Codes of B lines: ``(B, BK)`` where J runs along rows, else ``(BK, B)``.

    Offsets have as many bits as ``ld``: 64 are needed where a tile spans 2 GiB.
    """
    i_line, i_j = tl.arange(0, B), tl.arange(0, BK)
    if COLUMNS:
        o_tile, mask = i_j[:, None] * ld + i_line[None, :], m_j[:, None] & m_line[None, :]
    else:
        o_tile, mask = i_line[:, None] * ld + i_j[None, :], m_line[:, None] & m_j[None, :]
    return tl.load(p_codes + o_tile, mask=mask, other=0.0)


@triton.jit
def load_scales(
    p_scales, line_ld, step_ld, m_line, m_s, TURN, SPAN, B: tl.constexpr, S: tl.constexpr
):
    """Scales of B lines as bytes: ``(B, S)``, or ``(S, B)`` to TURN; SPAN lines share one."""
    i_line, i_s = tl.arange(0, B) // SPAN, tl.arange(0, S)
    if TURN:
        o_tile, mask = i_s[:, None] * step_ld + i_line[None, :] * line_ld, m_s[:, None]
        mask = mask & m_line[None, :]
    else:
        o_tile, mask = i_line[:, None] * line_ld + i_s[None, :] * step_ld, m_s[None, :]
        mask = m_line[:, None] & mask
    return tl.load(p_scales + o_tile, mask=mask, other=0)


@triton.jit
def store_tile(p_tile, ld, m_m, m_n, total, BM: tl.constexpr, BN: tl.constexpr):
    """Round the sums of a tile, once, to the dtype of the result."""
    o_tile = tl.arange(0, BM)[:, None] * ld + tl.arange(0, BN)[None, :]
    mask = m_m[:, None] & m_n[None, :]
    tl.store(p_tile + o_tile, total.to(p_tile.dtype.element_ty), mask=mask)
