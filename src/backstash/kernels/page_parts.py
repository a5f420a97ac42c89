"""One part of a buffer into its page or back: what a program of ``pages.py`` moves at once.

What a buffer's elements are says how they lie in a page.  Bytes are copied as they are: as
words of four, sixteen bytes to a thread, where the addresses allow it.  Values are quantized to
MXFP8 on their way in; the layout is that of :mod:`backstash.kernels.reference.mx_pages`.

Bounds are rounded down to whole vectors, or to whole blocks of 32 values, so that the compiler
can see that a mask is the same for all of one; a rest that is smaller than that goes alone.

Letters: B blocks of 32 values, V values of a block.
"""

# The type checker knows neither launch options nor loops that Triton unrolls.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

from backstash.kernels.cast.exponents import exponent_of, factor_of, multiplier_of
from backstash.kernels.free_pages import find_page, next_part

LINE = tl.constexpr(128)
#: Can memory be asked for what is loaded later?  An interpreter has no such instruction.
AHEAD = tl.constexpr(not knobs.runtime.interpret)


@triton.jit
def fetch_ahead(p_part, is_there, PART: tl.constexpr):
    """Ask memory for a part of a buffer of bytes, so that it is in the cache when it is loaded."""
    if is_there:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [p_part + tl.arange(0, PART // LINE) * LINE],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def part_in(
    p_from,
    lookup,
    place,
    left,
    taken,
    p_given,
    PAGE: tl.constexpr,
    PAYLOAD: tl.constexpr,
    PART: tl.constexpr,
    WORDS: tl.constexpr,
    ASK: tl.constexpr,
):
    """Write ``min(left, PART)`` elements into a page.

    ``place`` is the slot that takes the page, and which part of it is written.  Returns the part
    that the program takes next, and the page.
    """
    slot, i_part = place
    if (p_from.dtype.element_ty == tl.uint8) & WORDS:
        i_word = tl.arange(0, PART // 4)
        end = (tl.minimum(left, PART) // 16 * 4).to(tl.int32)
        word = tl.load(p_from.to(tl.pointer_type(tl.int32)) + i_word, mask=i_word < end)
        # Both while what was asked for is on its way.
        following = next_part(taken, p_given, ASK)
        page, p_page = find_page(lookup, slot, PAGE)
        p_to = p_page + i_part * PART
        tl.store(p_to.to(tl.pointer_type(tl.int32)) + i_word, word, mask=i_word < end)
        if left < PART:
            _copy_bytes(p_from, p_to, end * 4 + tl.arange(0, 16), left, left)
    else:
        following = next_part(taken, p_given, ASK)
        page, p_page = find_page(lookup, slot, PAGE)
        if p_from.dtype.element_ty == tl.uint8:
            _copy_bytes(p_from, p_page + i_part * PART, tl.arange(0, PART), left, left)
        else:
            BLOCKS: tl.constexpr = PAYLOAD // 32
            B: tl.constexpr = PART // 32
            end = (tl.minimum(left, PART) // 32).to(tl.int32)
            _quantize(p_from, p_page, i_part * B, 0, end, 32, BLOCKS, B)
            if end * 32 < tl.minimum(left, PART):
                rest = (left - end * 32).to(tl.int32)
                _quantize(p_from, p_page, i_part * B, end, end + 1, rest, BLOCKS, 1)
    return following, page


@triton.jit
def part_out(
    p_page,
    p_to,
    i_part,
    lengths,
    taken,
    p_given,
    PAYLOAD: tl.constexpr,
    PART: tl.constexpr,
    WORDS: tl.constexpr,
    ASK: tl.constexpr,
):
    """Write ``min(left, PART)`` elements of the ``i_part``-th part of a page.

    ``lengths`` are ``left`` and how many of these are there: where none are, none are read, and
    zeros are written.  Returns the part that the program takes next.
    """
    left, there = lengths
    if (p_to.dtype.element_ty == tl.uint8) & WORDS:
        p_from = p_page + i_part * PART
        i_word = tl.arange(0, PART // 4)
        end = (tl.minimum(left, PART) // 16 * 4).to(tl.int32)
        end_there = (tl.minimum(there, PART) // 16 * 4).to(tl.int32)
        p_from_word = p_from.to(tl.pointer_type(tl.int32)) + i_word
        word = tl.load(p_from_word, mask=i_word < end_there, other=0)
        # While what was asked for is on its way.
        following = next_part(taken, p_given, ASK)
        tl.store(p_to.to(tl.pointer_type(tl.int32)) + i_word, word, mask=i_word < end)
        if left < PART:
            _copy_bytes(p_from, p_to, end * 4 + tl.arange(0, 16), left, there)
    else:
        following = next_part(taken, p_given, ASK)
        if p_to.dtype.element_ty == tl.uint8:
            _copy_bytes(p_page + i_part * PART, p_to, tl.arange(0, PART), left, there)
        else:
            BLOCKS: tl.constexpr = PAYLOAD // 32
            B: tl.constexpr = PART // 32
            end = (tl.minimum(left, PART) // 32).to(tl.int32)
            _dequantize(p_page, p_to, i_part * B, 0, end, 32, there, BLOCKS, B)
            if end * 32 < tl.minimum(left, PART):
                rest = (left - end * 32).to(tl.int32)
                _dequantize(p_page, p_to, i_part * B, end, end + 1, rest, there, BLOCKS, 1)
    return following


@triton.jit
def _copy_bytes(p_from, p_to, i_byte, left, there):
    byte = tl.load(p_from + i_byte, mask=i_byte < there, other=0)
    tl.store(p_to + i_byte, byte, mask=i_byte < left)


@triton.jit
def _quantize(p_from, p_page, before, i_first, end, width, BLOCKS: tl.constexpr, B: tl.constexpr):
    """Blocks from ``i_first`` to ``end``, which begin ``before`` blocks into the page."""
    i_B = i_first + tl.arange(0, B)
    i_V = tl.arange(0, 32)
    m_BV = (i_B < end)[:, None] & (i_V < width)[None, :]
    o_BV = i_B[:, None] * 32 + i_V[None, :]
    x_BV = tl.load(p_from + o_BV, mask=m_BV, other=0).to(tl.float32)
    # The maximum with a NaN is the other operand: a NaN does not count.
    exponent_B = exponent_of(tl.maximum(tl.max(tl.abs(x_BV), 1), 0.0))
    codes_BV = (x_BV * multiplier_of(exponent_B)[:, None]).to(tl.float8e4nv)
    tl.store(p_page + before * 32 + o_BV, codes_BV.to(tl.uint8, bitcast=True), mask=m_BV)
    p_exponents = p_page + BLOCKS * 32 + before + i_B
    tl.store(p_exponents, exponent_B.to(tl.uint8), mask=i_B < end)


@triton.jit
def _dequantize(
    p_page, p_to, before, i_first, end, width, there, BLOCKS: tl.constexpr, B: tl.constexpr
):
    i_B = i_first + tl.arange(0, B)
    i_V = tl.arange(0, 32)
    m_V = (i_V < width)[None, :]
    m_there_B = i_B < tl.where(there > 0, end, 0)
    o_BV = i_B[:, None] * 32 + i_V[None, :]
    codes_BV = tl.load(p_page + before * 32 + o_BV, mask=m_there_B[:, None] & m_V, other=0)
    p_exponents = p_page + BLOCKS * 32 + before + i_B
    exponent_B = tl.load(p_exponents, mask=m_there_B, other=0).to(tl.int32)
    x_BV = codes_BV.to(tl.float8e4nv, bitcast=True).to(tl.float32) * factor_of(exponent_B)[:, None]
    tl.store(p_to + o_BV, x_BV.to(p_to.dtype.element_ty), mask=(i_B < end)[:, None] & m_V)
