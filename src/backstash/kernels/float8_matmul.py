"""Products of float8 codes on a GPU, and codes turned for them.

Dense products go to cuBLAS.  Those of groups, whose sizes are read on the device, go to the
matmuls of groups on a Hopper GPU, which read codes as they read values, and to a plain kernel
elsewhere.  The copy engine reads each group's codes from an address of whole 16 bytes: hence the
padding of :func:`transpose_groups`, which turns codes and pads groups in one pass over the bytes.

Letters: M and C rows of the operands, J what is added up over, T rows of a buffer, K and N
features, G groups, P columns with padding.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm  # pyright: ignore

from backstash.device import capability
from backstash.kernels.blocks import block_count, block_table, locate_block, new_bytes
from backstash.kernels.float8_groups import mm_columns, mm_rows
from backstash.kernels.launches import Launcher
from backstash.kernels.permutation import permute
from backstash.kernels.reference.float8_mm import FLOAT8_UNIT, Scaled, padded_columns
from backstash.kernels.reference.gathered_mm import check_source
from backstash.kernels.sizes import ceil_div, next_power_of_2

try:
    from backstash.kernels.gathered_rows import multiply_gathered_scaled_rows
    from backstash.kernels.grouped_columns import multiply_scaled_columns
    from backstash.kernels.grouped_rows import multiply_scaled_rows
    from backstash.kernels.warpgroups import aligned, is_aligned, values_a_block

    _HAS_GLUON = True
except (ImportError, AttributeError):  # Gluon is new in Triton and still changes its names.
    _HAS_GLUON = False

_HOPPER = 9
_TILE = 128
_WARPS = 8


@triton.jit
def pad_ends(p_ends, p_padded, groups, rows, UNIT: tl.constexpr, BG: tl.constexpr):
    """Write where each group ends after padding."""
    i_group = tl.arange(0, BG)
    m_group = i_group < groups
    ends = tl.load(p_ends + i_group, mask=m_group, other=0)
    ends = tl.minimum(tl.maximum(ends, 0), rows).to(tl.int32)
    before = tl.load(p_ends + i_group - 1, mask=m_group & (i_group > 0), other=0)
    before = tl.minimum(tl.maximum(before, 0), rows).to(tl.int32)
    units = (tl.maximum(ends - before, 1) + UNIT - 1) // UNIT
    padded = tl.cumsum(tl.where(m_group, units, 0), 0) * UNIT
    tl.store(p_padded + i_group, padded, mask=m_group)


@triton.jit
def _padded_ends_kernel(p_ends, p_padded, groups, rows, UNIT: tl.constexpr, BG: tl.constexpr):
    pad_ends(p_ends, p_padded, groups, rows, UNIT, BG)


@triton.jit
def start_of(p_ends, group, rows):
    """The first row of a group, inside the buffer whatever the ends say."""
    start = tl.load(p_ends + group - 1, mask=group > 0, other=0)
    return tl.minimum(tl.maximum(start, 0), rows)


@triton.jit
def turned_places(p_ends, p_padded, group, first, rows, B: tl.constexpr, UNIT: tl.constexpr):
    """Where the B rows from ``first`` of a group go among its turned columns, and up to where.

    A whole tile is followed by the next; the last of a group by zeros to its end.
    """
    to = tl.load(p_padded + group - 1, mask=group > 0, other=0) + first
    to -= start_of(p_ends, group, rows)
    last = tl.minimum(tl.load(p_padded + group), to + B)
    return tl.multiple_of(to, UNIT), tl.multiple_of(last, UNIT)


@triton.jit
def zero_empty_group(
    p_turned, p_ends, p_padded, group, rows, i_column, m_column, turned_stride, UNIT: tl.constexpr
):
    """Write the unit of zeros that stands for a group without rows."""
    end = tl.minimum(tl.maximum(tl.load(p_ends + group), 0), rows)
    if end <= start_of(p_ends, group, rows):
        last = tl.multiple_of(tl.load(p_padded + group), UNIT)
        i_to = (last - UNIT + tl.arange(0, UNIT)).to(tl.int64)
        p_tile = p_turned + i_column[:, None] * turned_stride + i_to[None, :]
        zeros = tl.zeros([m_column.shape[0], UNIT], p_turned.dtype.element_ty)
        tl.store(p_tile, zeros, mask=m_column[:, None])


@triton.jit
def _transpose_groups_kernel(
    p_codes,
    p_turned,
    p_ends,
    p_padded,
    p_table,
    groups,
    rows,
    columns,
    row_stride,
    turned_stride,
    blocks,
    B: tl.constexpr,
    UNIT: tl.constexpr,
):
    """A tile of one group's rows; after all tiles, the unit of zeros of each empty group."""
    chunks = tl.cdiv(columns, B)
    i_block = tl.program_id(0) // chunks
    i_column = ((tl.program_id(0) % chunks) * B + tl.arange(0, B)).to(tl.int64)
    m_column = i_column < columns
    if i_block < blocks:
        first, end, group = locate_block(p_table, rows, i_block, B)
        if group < groups and first < end:
            to, last = turned_places(p_ends, p_padded, group, first, rows, B, UNIT)
            i_row = first + tl.arange(0, B)
            mask = (i_row < end)[:, None] & m_column[None, :]
            p_tile = p_codes + i_row.to(tl.int64)[:, None] * row_stride + i_column[None, :]
            codes = tl.load(p_tile, mask=mask, other=0)
            i_to = to + tl.arange(0, B)
            mask = m_column[:, None] & (i_to < last)[None, :]
            p_tile = p_turned + i_column[:, None] * turned_stride + i_to.to(tl.int64)[None, :]
            tl.store(p_tile, tl.trans(codes), mask=mask)
    else:
        zero_empty_group(
            p_turned,
            p_ends,
            p_padded,
            i_block - blocks,
            rows,
            i_column,
            m_column,
            turned_stride,
            UNIT,
        )


_pad_ends, _transpose = Launcher(_padded_ends_kernel), Launcher(_transpose_groups_kernel)


def float8_mm(
    a: Scaled,
    b: Scaled,
    bias_C: Tensor | None,
    dtype: torch.dtype,
    *,
    fast_accumulation: bool = False,
) -> Tensor:
    """``a b^T + bias`` as ``(M, C)`` in ``dtype``."""
    scales, scaling = (a.scale_inv, b.scale_inv), ScalingType.TensorWise
    if any(scale_inv.ndim == 2 for scale_inv in scales):
        scaling = ScalingType.RowWise
        scales = _rows(a), _rows(b).view(1, -1)
    # With a result in float32 the unit adds no bias.
    unit_bias = None if dtype is torch.float32 else bias_C
    y_MC = scaled_mm(
        _aligned(a.codes),
        _aligned(b.codes).t(),
        scales[0],
        scaling,
        scales[1],
        scaling,
        bias=unit_bias,
        output_dtype=dtype,
        use_fast_accum=fast_accumulation,
    )
    return y_MC if bias_C is unit_bias or bias_C is None else y_MC + bias_C


def float8_grouped_mm(
    a: Scaled, b: Scaled, ends_G: Tensor, dtype: torch.dtype, *, fast_accumulation: bool = False
) -> Tensor:
    """Each row times its own group's ``b^T``: ``(T, C)`` in ``dtype``; the tail is zeros."""
    if 0 in (*a.codes.shape, *b.codes.shape):
        return b.scale_inv.new_zeros(len(a.codes), b.codes.shape[1], dtype=dtype)
    if not _is_for_hopper(a.codes):
        return mm_rows(a, b, ends_G, dtype, fast_accumulation=fast_accumulation)
    a, b = (Scaled(aligned(one.codes), one.scale_inv) for one in (a, b))
    return multiply_scaled_rows(a, b, ends_G, dtype, fast_accumulation=fast_accumulation)


def float8_gathered_mm(
    a: Scaled,
    b: Scaled,
    ends_G: Tensor,
    source_R: Tensor,
    dtype: torch.dtype,
    *,
    fast_accumulation: bool = False,
) -> Tensor:
    """Each row's token times the row's own group's ``b^T``: ``(R, C)`` in ``dtype``."""
    check_source(source_R)
    is_whole = 0 not in (*a.codes.shape, *b.codes.shape, len(source_R))
    if is_whole and _is_for_hopper(a.codes) and _are_blocks(a.codes):
        b = Scaled(aligned(b.codes), b.scale_inv)
        rows = a, b, ends_G, source_R, dtype
        return multiply_gathered_scaled_rows(*rows, fast_accumulation=fast_accumulation)
    copies = permute(a.codes.view(torch.uint8), source_R).view(a.codes.dtype)
    a = Scaled(copies, permute(a.scale_inv.unsqueeze(1), source_R).squeeze(1))
    return float8_grouped_mm(a, b, ends_G, dtype, fast_accumulation=fast_accumulation)


def float8_grouped_mm_dw(
    dy: Scaled, x: Scaled, padded_ends_G: Tensor, dtype: torch.dtype
) -> Tensor:
    """``dy x^T`` over each group's columns: ``(G, N, K)``; zeros for an empty group."""
    if 0 in (len(dy.codes), len(x.codes), len(padded_ends_G)):
        return x.scale_inv.new_zeros(len(padded_ends_G), len(dy.codes), len(x.codes), dtype=dtype)
    if not _is_for_hopper(x.codes):
        return mm_columns(dy, x, padded_ends_G, dtype)
    dy, x = (Scaled(aligned(one.codes), one.scale_inv) for one in (dy, x))
    return multiply_scaled_columns(dy, x, padded_ends_G, dtype)


def transpose_groups(codes_TK: Tensor, ends_G: Tensor) -> tuple[Tensor, Tensor]:
    """Codes the other way round, each group beginning at a whole unit."""
    codes_TK = codes_TK if codes_TK.stride(1) == 1 else codes_TK.contiguous()
    rows, columns = codes_TK.shape
    ends_G = ends_G.int().contiguous()
    groups = len(ends_G)
    padded_G = write_padded_ends(ends_G, rows)
    turned_KP = new_bytes(columns, padded_columns(rows, groups), like=codes_TK)
    blocks = block_count(rows, ends_G, _TILE)
    programs = (blocks + groups) * ceil_div(columns, _TILE)
    tile: dict[str, Any] = {"B": _TILE, "UNIT": FLOAT8_UNIT, "num_warps": _WARPS}
    if programs:
        _transpose(
            programs,
            codes_TK.view(torch.uint8),
            turned_KP,
            ends_G,
            padded_G,
            block_table(ends_G, rows, _TILE),
            groups,
            rows,
            columns,
            codes_TK.stride(0),
            turned_KP.stride(0),
            blocks,
            **tile,
        )
    return turned_KP.view(codes_TK.dtype), padded_G


def write_padded_ends(ends_G: Tensor, rows: int) -> Tensor:
    """Where each group ends after padding: int32, at least one unit for each."""
    groups = len(ends_G)
    padded_G = torch.empty(groups, dtype=torch.int32, device=ends_G.device)
    tile: dict[str, Any] = {"UNIT": FLOAT8_UNIT, "BG": next_power_of_2(groups)}
    _pad_ends(1, ends_G, padded_G, groups, rows, **tile)
    return padded_G


def _is_for_hopper(codes: Tensor) -> bool:
    """Say if the kernels for Hopper multiply groups of these codes."""
    return _HAS_GLUON and capability(codes.device)[0] == _HOPPER


def _are_blocks(codes: Tensor) -> bool:
    """Say if rows of these can be fetched one by one: whole blocks of them, whole units apart."""
    return codes.shape[1] % values_a_block(codes) == 0 and is_aligned(codes)


def _rows(operand: Scaled) -> Tensor:
    """An inverse scale for each row ``(M, 1)``, also where all rows share one."""
    scale_inv, rows = operand.scale_inv, len(operand.codes)
    return scale_inv if scale_inv.ndim == 2 else scale_inv.expand(rows).unsqueeze(1).contiguous()


def _aligned(codes: Tensor) -> Tensor:
    """The codes, what is added up side by side, lines at addresses that the unit can read from."""
    *strides, step = codes.stride()
    if step != 1 or any(stride % FLOAT8_UNIT for stride in strides):
        codes = codes.contiguous()
    return codes.clone() if codes.storage_offset() % FLOAT8_UNIT else codes
