"""Values into pages as MXFP8 and back, on a GPU; the meaning is in its reference twin.

Launches and free list are as for bytes.  A program takes a power of two of blocks at once, and
a page holds a multiple of that, so no program writes to two pages at a time.

Letters: B blocks that a program takes at once, of 32 values each.
"""

# The type checker knows neither launch options nor loops that Triton unrolls.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.cast.exponents import exponent_of, factor_of, multiplier_of
from backstash.kernels.pages import (
    BYTES_RESTORED,
    HEAD_DEVICE,
    HEAD_HOST,
    HEADER,
    TAIL_DEVICE,
    TAIL_HOST,
    check_count,
    commit,
    first_block,
    program_count,
    valid_length,
)
from backstash.kernels.reference.mx_pages import mx_page_blocks

_VALUES = 32
_NUM_WARPS = 4


def stash_mx_pages(
    sources: Sequence[Tensor],
    rows: Sequence[Tensor],
    row_values: Sequence[int],
    table: Tensor,
    device_pages: Tensor,
    host_pages: Tensor,
    free_N: Tensor,
    state: Tensor,
    receipt: Tensor,
    *,
    page_bytes: int,
    number: int,
) -> None:
    """Quantize the valid prefix of each source into pages, in one launch of at most 8."""
    check_count(len(sources))
    blocks, at_once = mx_page_blocks(page_bytes)
    bound = sum(triton.cdiv(source.numel(), at_once * _VALUES) for source in sources)
    programs = program_count(bound, free_N.device)
    _stash[(programs,)](
        tuple(sources),
        tuple(rows),
        tuple(row_values),
        tuple(source.numel() // width for source, width in zip(sources, row_values, strict=True)),
        table,
        device_pages,
        host_pages,
        free_N,
        state,
        receipt,
        device_pages.numel() // page_bytes,
        host_pages.numel() // page_bytes,
        number,
        programs,
        ITEM_BYTES=tuple(source.itemsize for source in sources),
        BUFFERS=len(sources),
        PAGE=page_bytes,
        PAGE_BLOCKS=blocks,
        B=at_once,
        num_warps=_NUM_WARPS,
    )


def restore_mx_pages(
    destinations: Sequence[Tensor],
    places: Sequence[int],
    table: Tensor,
    device_pages: Tensor,
    host_pages: Tensor,
    state: Tensor,
    *,
    buffers: int,
    page_bytes: int,
) -> None:
    """Write the values of the valid prefix of some buffers of a launch, in one launch."""
    check_count(len(destinations))
    blocks, at_once = mx_page_blocks(page_bytes)
    bound = sum(triton.cdiv(values.numel(), at_once * _VALUES) for values in destinations)
    programs = program_count(bound, table.device)
    _restore[(programs,)](
        tuple(destinations),
        tuple(places),
        tuple(values.numel() for values in destinations),
        table,
        device_pages,
        host_pages,
        state,
        device_pages.numel() // page_bytes,
        programs,
        ITEM_BYTES=tuple(values.itemsize for values in destinations),
        GIVEN=len(destinations),
        BUFFERS=buffers,
        PAGE=page_bytes,
        PAGE_BLOCKS=blocks,
        B=at_once,
        num_warps=_NUM_WARPS,
    )


@triton.jit
def _quantize(p_from, p_page, i_part, left, PAGE_BLOCKS: tl.constexpr, B: tl.constexpr):
    """Write the codes and exponents of the ``i_part``-th B blocks of a page."""
    i_block, i_value = tl.arange(0, B), tl.arange(0, 32)
    i_BV = i_block[:, None] * 32 + i_value[None, :]
    # Loads and stores without a mask move vectors.
    is_whole = left >= B * 32
    if is_whole:
        x_BV = tl.load(p_from + i_BV).to(tl.float32)
    else:
        x_BV = tl.load(p_from + i_BV, mask=i_BV < left, other=0).to(tl.float32)
    # The maximum with a NaN is the other operand: a NaN does not count.
    exponent_B = exponent_of(tl.maximum(tl.max(tl.abs(x_BV), 1), 0.0))
    codes_BV = (x_BV * multiplier_of(exponent_B)[:, None]).to(tl.float8e4nv)
    codes_BV = codes_BV.to(tl.uint8, bitcast=True)
    p_codes = p_page + i_part * (B * 32)
    if is_whole:
        tl.store(p_codes + i_BV, codes_BV)
    else:
        tl.store(p_codes + i_BV, codes_BV, mask=i_BV < left)
    p_exponents = p_page + PAGE_BLOCKS * 32 + i_part * B
    tl.store(p_exponents + i_block, exponent_B.to(tl.uint8), mask=i_block * 32 < left)


@triton.jit
def _dequantize(p_page, p_to, i_part, left, PAGE_BLOCKS: tl.constexpr, B: tl.constexpr):
    """Write the values of the ``i_part``-th B blocks of a page."""
    i_block, i_value = tl.arange(0, B), tl.arange(0, 32)
    i_BV = i_block[:, None] * 32 + i_value[None, :]
    is_whole = left >= B * 32
    p_codes = p_page + i_part * (B * 32)
    if is_whole:
        codes_BV = tl.load(p_codes + i_BV)
    else:
        codes_BV = tl.load(p_codes + i_BV, mask=i_BV < left, other=0)
    p_exponents = p_page + PAGE_BLOCKS * 32 + i_part * B
    exponent_B = tl.load(p_exponents + i_block, mask=i_block * 32 < left, other=0).to(tl.int32)
    x_BV = codes_BV.to(tl.float8e4nv, bitcast=True).to(tl.float32) * factor_of(exponent_B)[:, None]
    x_BV = x_BV.to(p_to.dtype.element_ty)
    if is_whole:
        tl.store(p_to + i_BV, x_BV)
    else:
        tl.store(p_to + i_BV, x_BV, mask=i_BV < left)


@triton.jit(do_not_specialize=["device_size", "host_size", "number", "programs"])
def _stash(
    p_sources,
    p_rows,
    row_values,
    capacity_rows,
    p_table,
    p_device,
    p_host,
    p_free,
    p_state,
    p_receipt,
    device_size,
    host_size,
    number,
    programs,
    ITEM_BYTES: tl.constexpr,
    BUFFERS: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_BLOCKS: tl.constexpr,
    B: tl.constexpr,
):
    i_program = tl.program_id(0).to(tl.int64)
    head_device = tl.load(p_state + HEAD_DEVICE)
    head_host = tl.load(p_state + HEAD_HOST)
    free_device = tl.load(p_state + TAIL_DEVICE) - head_device
    free_host = tl.load(p_state + TAIL_HOST) - head_host
    total = tl.full((), 0, tl.int64)
    for i in tl.static_range(BUFFERS):
        count = valid_length(p_rows[i], capacity_rows[i], row_values[i])
        total += tl.cdiv(count, PAGE_BLOCKS * 32)
    from_device = tl.minimum(total, free_device)
    fits = total - from_device <= free_host

    first = tl.full((), 0, tl.int64)
    parts_before = tl.full((), 0, tl.int64)
    bytes_stashed = tl.full((), 0, tl.int64)
    for i in tl.static_range(BUFFERS):
        count = valid_length(p_rows[i], capacity_rows[i], row_values[i])
        if i_program == 0:
            tl.store(p_table + HEADER + i, count * ITEM_BYTES[i])
            tl.store(p_table + HEADER + BUFFERS + i, first)
        parts = tl.where(fits, tl.cdiv(count, B * 32), 0)
        for i_part in range(first_block(i_program, parts_before, programs), parts, programs):
            o_value = i_part * (B * 32)
            slot = first + i_part // (PAGE_BLOCKS // B)
            in_page = i_part % (PAGE_BLOCKS // B)
            p_from = p_sources[i] + o_value
            if slot < from_device:
                page = tl.load(p_free + (head_device + slot) % device_size).to(tl.int64)
                _quantize(p_from, p_device + page * PAGE, in_page, count - o_value, PAGE_BLOCKS, B)
            else:
                o_ring = (head_host + slot - from_device) % host_size
                page = tl.load(p_free + device_size + o_ring).to(tl.int64)
                p_page = p_host + (page - device_size) * PAGE
                _quantize(p_from, p_page, in_page, count - o_value, PAGE_BLOCKS, B)
            if in_page == 0:
                tl.store(p_table + HEADER + 2 * BUFFERS + slot, page)
        parts_before += parts
        bytes_stashed += count * ITEM_BYTES[i]
        first += tl.cdiv(count, PAGE_BLOCKS * 32)
    sizes, heads = (device_size, host_size), (head_device, head_host)
    free = (free_device, free_host)
    commit(p_state, p_table, p_receipt, sizes, heads, free, total, bytes_stashed, number, programs)


@triton.jit(do_not_specialize=["device_size", "programs"])
def _restore(
    p_destinations,
    places,
    capacities,
    p_table,
    p_device,
    p_host,
    p_state,
    device_size,
    programs,
    ITEM_BYTES: tl.constexpr,
    GIVEN: tl.constexpr,
    BUFFERS: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_BLOCKS: tl.constexpr,
    B: tl.constexpr,
):
    i_program = tl.program_id(0).to(tl.int64)
    missing = tl.load(p_table + 2)
    parts_before = tl.full((), 0, tl.int64)
    bytes_restored = tl.full((), 0, tl.int64)
    for i in tl.static_range(GIVEN):
        count = tl.load(p_table + HEADER + places[i]) // ITEM_BYTES[i]
        count = tl.minimum(count, capacities[i])
        first = tl.load(p_table + HEADER + BUFFERS + places[i])
        parts = tl.cdiv(count, B * 32)
        for i_part in range(first_block(i_program, parts_before, programs), parts, programs):
            o_value = i_part * (B * 32)
            p_to = p_destinations[i] + o_value
            left = count - o_value
            if missing > 0:
                i_value = tl.arange(0, B * 32)
                tl.store(p_to + i_value, 0.0, mask=i_value < left)
            else:
                slot = first + i_part // (PAGE_BLOCKS // B)
                page = tl.load(p_table + HEADER + 2 * BUFFERS + slot)
                in_page = i_part % (PAGE_BLOCKS // B)
                if page < device_size:
                    p_page = p_device + page * PAGE
                    _dequantize(p_page, p_to, in_page, left, PAGE_BLOCKS, B)
                else:
                    p_page = p_host + (page - device_size) * PAGE
                    _dequantize(p_page, p_to, in_page, left, PAGE_BLOCKS, B)
        parts_before += parts
        bytes_restored += count * ITEM_BYTES[i]
    if (i_program == 0) & (missing == 0):
        tl.atomic_add(p_state + BYTES_RESTORED, bytes_restored)
