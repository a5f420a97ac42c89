"""Float8 codes of experts' weights on a GPU, along rows and, turned, down columns.

All experts have as many rows, so nothing is prepared before or launched in between: a program
knows from its number which rows and columns of which expert it has.

A column's scale waits for all of an expert's rows.  Where forward casts the rows it sees every
value anyway, so it notes the largest magnitudes of the columns on the way, and backward reads the
weight once for its columns, a tile at a time.  A program of that pass is one warp, so that nothing
in its loop waits for other warps; it keeps what it notes two of 16 bits in a word, and a small
launch finds those of each expert among the programs'.  Without notes a program takes a strip of
columns: it finds their largest magnitudes, and reads the strip again for its codes, from its end.

Letters: G experts, N rows and K columns of each, P parts of an expert's rows.
"""

# What is known when a kernel is compiled has a type that this checker takes for Python's.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.cast.pairs import high_half, larger_pair, low_half, magnitudes
from backstash.kernels.cast.scales import scale_of, scaling_of
from backstash.kernels.float8_rowwise import column_amax, quantize_float8_rows
from backstash.kernels.launches import Launcher
from backstash.kernels.reference import float8_turned as reference
from backstash.kernels.reference.float8_turned import WeightRows, noted_dtype
from backstash.kernels.sizes import ceil_div

# Rows of a step and columns of a strip.
_TILE: dict[str, Any] = {"B": 128, "BK": 128, "num_warps": 16}
# Rows of a part and columns of a chunk; all of a row's notes are in a warp's registers.
_NOTING_TILE: dict[str, Any] = {"R": 32, "BI": 256, "num_warps": 1}
_MOST_COLUMNS = 2048
_TOP_TILE: dict[str, Any] = {"BP": 32, "BW": 64, "num_warps": 4}
_NOTED_TILE: dict[str, Any] = {"B": 128, "BK": 64, "num_warps": 4}


@triton.jit
def _weight_kernel(
    p_w,
    p_codes,
    p_scale,
    p_scale_inv,
    N,
    K,
    largest,
    epsilon,
    value_for_inf,
    exact,
    B: tl.constexpr,
    BK: tl.constexpr,
):
    chunks = tl.cdiv(K, BK)
    group = (tl.program_id(0) // chunks).to(tl.int64)
    i_column = tl.program_id(0) % chunks * BK + tl.arange(0, BK)
    m_column = i_column < K
    p_strip = p_w + group * N * K + i_column[None, :]
    o_scale = group * K + i_column
    p_to = p_codes + o_scale[:, None] * N
    i_step = tl.arange(0, B)
    magnitude = tl.zeros([B, BK], tl.float32)
    for first in range(0, N, B):
        i_row = first + i_step
        mask = (i_row < N)[:, None] & m_column[None, :]
        w = tl.load(p_strip + i_row[:, None] * K, mask=mask, other=0)
        # The maximum with a NaN is the other operand: a NaN does not count.
        magnitude = tl.maximum(magnitude, tl.abs(w.to(tl.float32)))
    amax = tl.maximum(tl.max(magnitude, 0), 0.0)
    scale, inverse = scale_of(amax, largest, epsilon, value_for_inf, exact)
    tl.store(p_scale_inv + o_scale, inverse, mask=m_column)
    # Each thread needs the scales of other columns now than it has found: they are read again.
    tl.store(p_scale + o_scale, scale, mask=m_column)
    tl.debug_barrier()
    # From the end: what was read last is still in the cache.
    for last in range(tl.cdiv(N, B), 0, -1):
        i_row = (last - 1) * B + i_step
        mask = (i_row < N)[:, None] & m_column[None, :]
        w = tl.load(p_strip + i_row[:, None] * K, mask=mask, other=0, eviction_policy="evict_first")
        scale = tl.load(p_scale + o_scale, mask=m_column, other=0)
        codes = (w.to(tl.float32) * scale[None, :]).to(p_codes.dtype.element_ty)
        tl.store(p_to + i_row[None, :], tl.trans(codes), mask=tl.trans(mask))


@triton.jit
def _noting_kernel(
    p_w,
    p_codes,
    p_scale_inv,
    p_words,
    N,
    K,
    parts,
    largest,
    epsilon,
    value_for_inf,
    exact,
    R: tl.constexpr,
    BI: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Codes of a part's rows, and the largest magnitudes of its columns."""
    group = (tl.program_id(0) // parts).to(tl.int64)
    first = tl.program_id(0) % parts * R
    words = K // 2
    p_w += group * N * words
    p_codes += group * N * K
    p_scale_inv += group * N
    nothing = tl.zeros([1, BI // 2], tl.int32)
    noted = (nothing,) * CHUNKS
    # The next row is on its way while one is cast.
    for row in tl.range(first, tl.minimum(first + R, N), num_stages=2):
        i_row = tl.cast(row, tl.int64) + tl.arange(0, 1)
        of_row = nothing
        pairs = ()
        new = ()
        for c in tl.static_range(CHUNKS):
            i_word = c * (BI // 2) + tl.arange(0, BI // 2)
            p_row = p_w + i_row[:, None] * words + i_word[None, :]
            pair = tl.load(p_row, mask=(i_word < words)[None, :], other=0)
            of_row = larger_pair(of_row, pair)
            pairs += (pair,)
            new += (larger_pair(noted[c], pair),)
        noted = new
        low, high = magnitudes(tl.reduce(of_row, 1, larger_pair))
        # The maximum with a NaN is the other operand: a row of them has no magnitude.
        amax = tl.maximum(tl.maximum(low, high), 0.0)
        scale, inverse = scale_of(amax, largest, epsilon, value_for_inf, exact)
        tl.store(p_scale_inv + i_row, inverse)
        for c in tl.static_range(CHUNKS):
            i_column = c * BI + tl.arange(0, BI)
            w = tl.reshape(tl.join(low_half(pairs[c]), high_half(pairs[c])), [1, BI])
            codes = (w * scale[:, None]).to(p_codes.dtype.element_ty)
            p_row = p_codes + i_row[:, None] * K + i_column[None, :]
            tl.store(p_row, codes, mask=(i_column < K)[None, :])
    p_words += tl.program_id(0).to(tl.int64) * words
    for c in tl.static_range(CHUNKS):
        i_word = c * (BI // 2) + tl.arange(0, BI // 2)
        tl.store(p_words + i_word, tl.reduce(noted[c], 0, larger_pair), mask=i_word < words)


@triton.jit
def _top_kernel(p_words, p_amax, words, parts, BP: tl.constexpr, BW: tl.constexpr):
    """The largest magnitudes of some columns of an expert among those of its parts."""
    chunks = tl.cdiv(words, BW)
    group = (tl.program_id(0) // chunks).to(tl.int64)
    i_word = tl.program_id(0) % chunks * BW + tl.arange(0, BW)
    p_words += group * parts * words
    top = tl.zeros([BP, BW], tl.int32)
    for first in range(0, parts, BP):
        i_part = first + tl.arange(0, BP)
        mask = (i_part < parts)[:, None] & (i_word < words)[None, :]
        p_part = p_words + i_part.to(tl.int64)[:, None] * words + i_word[None, :]
        top = larger_pair(top, tl.load(p_part, mask=mask, other=0))
    low, high = magnitudes(tl.reduce(top, 0, larger_pair))
    p_amax += group * (2 * words) + 2 * i_word
    tl.store(p_amax, tl.maximum(low, 0.0).to(p_amax.dtype.element_ty), mask=i_word < words)
    tl.store(p_amax + 1, tl.maximum(high, 0.0).to(p_amax.dtype.element_ty), mask=i_word < words)


@triton.jit
def _noted_kernel(
    p_w,
    p_amax,
    p_codes,
    p_scale_inv,
    N,
    K,
    largest,
    epsilon,
    value_for_inf,
    exact,
    B: tl.constexpr,
    BK: tl.constexpr,
):
    """A tile of an expert's columns, whose largest magnitudes are known, turned."""
    chunks, blocks = tl.cdiv(K, BK), tl.cdiv(N, B)
    group = (tl.program_id(0) // (chunks * blocks)).to(tl.int64)
    i_block = tl.program_id(0) // chunks % blocks
    i_row = i_block * B + tl.arange(0, B)
    i_column = tl.program_id(0) % chunks * BK + tl.arange(0, BK)
    m_row, m_column = i_row < N, i_column < K
    p_tile = p_w + group * N * K + i_row.to(tl.int64)[:, None] * K + i_column[None, :]
    w = tl.load(p_tile, mask=m_row[:, None] & m_column[None, :], other=0)
    o_scale = group * K + i_column
    amax = tl.load(p_amax + o_scale, mask=m_column, other=0).to(tl.float32)
    scale, inverse = scale_of(amax, largest, epsilon, value_for_inf, exact)
    # One program for all of a column's tiles.
    tl.store(p_scale_inv + o_scale, inverse, mask=i_column < tl.where(i_block == 0, K, 0))
    # Turned while it has 16 bits: there are instructions for that.
    codes = (tl.trans(w).to(tl.float32) * scale[:, None]).to(p_codes.dtype.element_ty)
    p_tile = p_codes + o_scale[:, None] * N + i_row[None, :]
    tl.store(p_tile, codes, mask=m_column[:, None] & m_row[None, :])


_turn, _turn_noted = Launcher(_weight_kernel), Launcher(_noted_kernel)
_note, _find_top = Launcher(_noting_kernel), Launcher(_top_kernel)


def quantize_float8_weight_rows(
    w_GNK: Tensor, code_dtype: torch.dtype, *, epsilon: float = 0.0, power_of_two: bool = False
) -> WeightRows:
    """The rows of all experts, and what their columns have at most, part by part."""
    w_GNK = w_GNK.contiguous()
    G, N, K = w_GNK.shape
    is_whole = K % 2 == 0 and K <= _MOST_COLUMNS and w_GNK.data_ptr() % 4 == 0
    if w_GNK.dtype is not torch.bfloat16 or not is_whole or 0 in (G, N, K):
        options: dict[str, Any] = {"epsilon": epsilon, "power_of_two": power_of_two}
        rows = quantize_float8_rows(w_GNK.flatten(0, 1), code_dtype, **options)
        ends_G = torch.arange(1, G + 1, dtype=torch.int32, device=w_GNK.device) * N
        amax_GK = column_amax(w_GNK.flatten(0, 1), ends_G)
        return WeightRows(*rows, amax_GK.unsqueeze(1).to(noted_dtype(w_GNK)))
    codes = torch.empty(G * N, K, dtype=torch.uint8, device=w_GNK.device)
    scale_inv = torch.empty(G * N, 1, dtype=torch.float32, device=w_GNK.device)
    parts = ceil_div(N, _NOTING_TILE["R"])
    parts_GPK = torch.empty(G, parts, K, dtype=w_GNK.dtype, device=w_GNK.device)
    scaling = scaling_of(code_dtype, epsilon, power_of_two=power_of_two)
    words = w_GNK.view(torch.int32), parts_GPK.view(torch.int32)
    given = words[0], codes.view(code_dtype), scale_inv, words[1]
    chunks = {"CHUNKS": ceil_div(K, _NOTING_TILE["BI"])}
    _note(G * parts, *given, N, K, parts, *scaling, **chunks, **_NOTING_TILE)
    return WeightRows(codes, scale_inv, parts_GPK)


def largest_of_parts(parts_GPK: Tensor) -> Tensor:
    """The largest magnitudes ``(G, K)`` of what :func:`quantize_float8_weight_rows` noted."""
    G, parts, K = parts_GPK.shape
    if parts_GPK.dtype is not torch.bfloat16 or K % 2 or not parts_GPK.is_contiguous():
        return reference.largest_of_parts(parts_GPK)
    amax_GK = torch.empty(G, K, dtype=parts_GPK.dtype, device=parts_GPK.device)
    if programs := G * ceil_div(K // 2, _TOP_TILE["BW"]):
        words = parts_GPK.view(torch.int32)
        _find_top(programs, words, amax_GK, K // 2, parts, **_TOP_TILE)
    return amax_GK


def quantize_float8_weight(
    w_GNK: Tensor,
    code_dtype: torch.dtype,
    amax_GK: Tensor | None = None,
    *,
    epsilon: float = 0.0,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor]:
    """Codes ``(G, K, N)`` and inverse scales ``(G, K)`` of each expert's columns."""
    w_GNK = w_GNK.contiguous()
    G, N, K = w_GNK.shape
    new: dict[str, Any] = {"device": w_GNK.device}
    codes_GKN = torch.empty(G, K, N, dtype=code_dtype, **new)
    scaling = scaling_of(code_dtype, epsilon, power_of_two=power_of_two)
    if amax_GK is not None and N:
        scale_inv_GK = torch.empty(G, K, dtype=torch.float32, **new)
        given = w_GNK, amax_GK.contiguous(), codes_GKN, scale_inv_GK
        tiles = G * ceil_div(N, _NOTED_TILE["B"]) * ceil_div(K, _NOTED_TILE["BK"])
        if tiles:
            _turn_noted(tiles, *given, N, K, *scaling, **_NOTED_TILE)
        return codes_GKN, scale_inv_GK
    scale_GK, scale_inv_GK = torch.empty(2, G, K, dtype=torch.float32, **new)
    if programs := G * ceil_div(K, _TILE["BK"]):
        _turn(programs, w_GNK, codes_GKN, scale_GK, scale_inv_GK, N, K, *scaling, **_TILE)
    return codes_GKN, scale_inv_GK
