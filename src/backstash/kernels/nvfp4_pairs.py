"""The arithmetic of NVFP4 on pairs of bfloat16 values inside a Triton kernel.

Two bfloat16 values side by side are one word, and a GPU has instructions that work on both
halves of a word: the largest magnitude of blocks and the limit on values are found so.  Each
value is then scaled and rounded in float32, as the format is defined.

No comparison rounds here.  With ``C = 2^22 + 1``, ``t = C * max(size, 1)`` and then
``t + (size - t)`` is ``size`` rounded to two significant bits, and to multiples of a half
below one, ties to even: what a code can be.  All of it is done at ``2^-126``, where the bits
of a float are the code followed by 22 zeros.
"""

# What is known when a kernel is compiled has a type that this checker takes for Python's.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.kernels.cast.pairs import high_half, larger_pair, low_half
from backstash.kernels.nvfp4_codes import LARGEST_FLOAT, e4m3, random_words

_TINY = tl.constexpr(2.0**-126)
_SPLIT = tl.constexpr((2.0**22 + 1) * 2.0**-126)
# The largest bfloat16, and one that the largest multiplier brings a little beyond 6.
_LARGEST_LIMIT = tl.constexpr(3.3895313892515355e38)
_SMALLEST_LIMIT = tl.constexpr(1.5078125 * 2.0**-126)


@triton.jit
def limited_pair(pair, limits):
    """Magnitudes of at most the limit in each half; that of a NaN is the limit."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; abs.bf16x2 t, $1; min.bf16x2 $0, t, $2; }", "=r,r,r", [pair, limits],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _without_nan(pair):
    """The same pair, its NaNs without a sign."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 o, z; mov.b32 o, 0x3F803F80; mov.b32 z, 0x80008000;"
        " fma.rn.bf16x2 $0, $1, o, z; }", "=r,r", [pair],
        dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def narrow_pair(lower, upper):
    """Two float32 values, rounded to bfloat16, as one word."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [lower, upper],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def shifted_word(lower, upper, bits):
    """The upper word of two after a shift to the left by fewer than 32 bits."""
    return tl.inline_asm_elementwise(
        "shf.l.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", [lower, upper, bits],
        dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def lower_halves(one, other):
    """The lower halves of two words as one word."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [one, other],
        dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def upper_halves(one, other):
    """The upper halves of two words as one word."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [one, other],
        dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _code_of(size):
    """The code of a magnitude below 7, times ``2^22``."""
    above = tl.clamp(tl.fma(size, 0.125, -0.125), 0.0, 1.0)
    split = tl.fma(above, -8 * _SPLIT, -_SPLIT)
    return (tl.fma(size, _TINY, split) - split).to(tl.uint32, bitcast=True)


@triton.jit
def four_codes(sizes, others):
    """The codes of four magnitudes as nibbles of the lower half, of four others in the upper."""
    codes = ()
    for k in tl.static_range(4):
        # The upper half of a code has it six bits from its end.
        codes += (upper_halves(_code_of(sizes[k]), _code_of(others[k])),)
    return ((codes[0] + codes[1] * 16) >> 6) + (codes[2] + codes[3] * 16) * 4


@triton.jit
def _place_of(size, word, start, k: tl.constexpr):
    """Where a magnitude lies between codes plus random byte ``k`` of a word, from 128 on.

    The bits from the 16th on are the code.
    """
    place = tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r",
        [word, start, tl.full(word.shape, 0x7504 + 16 * k, tl.uint32)],
        dtype=tl.uint32, is_pure=True, pack=1,
    ).to(tl.float32, bitcast=True)  # fmt: skip
    place = tl.fma(tl.clamp(size * 0.5, 0.0, 1.0), 4.0, place)
    place = tl.fma(tl.clamp(tl.fma(size, 0.5, -1.0), 0.0, 1.0), 2.0, place)
    place += tl.clamp(tl.fma(size, 0.5, -2.0), 0.0, 1.0)
    return place.to(tl.uint32, bitcast=True)


@triton.jit
def four_drawn(sizes, others, random, multiplier):
    """Like :func:`four_codes`, but each one of two codes by a random byte of two words."""
    # The bits of 128, as a sum with a sign that is never there: an instruction takes one
    # constant, and two of them would be moved to a register for each value.
    start = (multiplier.to(tl.uint32, bitcast=True) >> 31) + 0x43000000
    codes = ()
    for k in tl.static_range(4):
        place = _place_of(sizes[k], random[0], start, k)
        other = _place_of(others[k], random[1], start, k)
        codes += (upper_halves(place, other),)
    total = codes[0] + codes[1] * 16 + codes[2] * 256 + codes[3] * 4096
    return total - (0x43004300 * 0x1111) % 2**32


@triton.jit
def four_signs(pairs):
    """The signs of four pairs as the highest bits of nibbles, lower and upper values apart."""
    signs = (_without_nan(pairs[0]) >> 12) & 0x00080008
    signs |= (_without_nan(pairs[1]) >> 8) & 0x00800080
    signs |= (_without_nan(pairs[2]) >> 4) & 0x08000800
    return signs | (_without_nan(pairs[3]) & 0x80008000)


@triton.jit
def eight_signs(pairs):
    """The signs of four pairs, one after another, as the highest bits of nibbles."""
    # Lower values in the lower half, at the highest bits of bytes; upper values in the upper.
    first = (_without_nan(pairs[0]) >> 8) & 0x00800080
    first |= _without_nan(pairs[1]) & 0x80008000
    second = (_without_nan(pairs[2]) >> 8) & 0x00800080
    second |= _without_nan(pairs[3]) & 0x80008000
    return (lower_halves(first, second) >> 4) | upper_halves(first, second)


@triton.jit
def inverse_of(value):
    """One over each value, rounded to nearest: fewer instructions than a division."""
    return tl.inline_asm_elementwise(
        "rcp.rn.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def scale_of(largest, over_all, inverse):
    """The byte of a block's scale, what its values are multiplied by, and their limit.

    The limit is scaled to little more than 6, so values beyond it have its code.
    """
    scale, byte = e4m3(largest * (over_all * (1.0 / 6.0)))
    product = scale * inverse
    multiplier = tl.minimum(inverse_of(product), LARGEST_FLOAT)
    return byte, multiplier, tl.maximum(product * 6.05, _SMALLEST_LIMIT)


@triton.jit
def largest_pair(pairs):
    """The largest magnitude in each half of some pairs; a NaN does not count."""
    largest = pairs[0] & 0
    for i in tl.static_range(len(pairs)):
        largest = larger_pair(largest, pairs[i])
    return largest & 0x7FFF7FFF


@triton.jit
def _limits(lower, upper, p_seed):
    """Two limits as a pair.  An infinity has the largest code only where codes are drawn."""
    if p_seed is None:
        lower, upper = tl.minimum(lower, _LARGEST_LIMIT), tl.minimum(upper, _LARGEST_LIMIT)
    return narrow_pair(lower, upper)


@triton.jit
def row_words(pairs, multiplier, limit, p_seed, i_block, STREAM: tl.constexpr):
    """The codes of blocks of eight pairs as two words.

    With a seed, block ``i_block`` of stream ``STREAM`` is rounded by its own random bytes.
    """
    if p_seed is not None:
        random = random_words(p_seed, i_block, pairs[0] & 0x7FFFFFFF, STREAM)
    limits = _limits(limit, limit, p_seed)
    words = ()
    for half in tl.static_range(2):
        sizes = ()
        for j in tl.static_range(4):
            pair = limited_pair(pairs[4 * half + j], limits)
            sizes += (low_half(pair) * multiplier, high_half(pair) * multiplier)
        if p_seed is None:
            codes = four_codes(sizes[:4], sizes[4:])
        else:
            of_half = random[2 * half], random[2 * half + 1]
            codes = four_drawn(sizes[:4], sizes[4:], of_half, multiplier)
        words += (codes | eight_signs(pairs[4 * half : 4 * half + 4]),)
    return words


@triton.jit
def column_words(pairs, over_all, inverse, p_seed, i_block):
    """Scales and codes of two columns of 16 rows of pairs, those of each column a tuple.

    With a seed, ``i_block`` is the block of the first of two columns; the other is the next.
    """
    if p_seed is not None:
        positive = pairs[0] & 0x7FFFFFFF
        random = random_words(p_seed, i_block, positive, 1)
        upper_random = random_words(p_seed, i_block + 1, positive, 1)
    largest = largest_pair(pairs)
    byte, multiplier, limit = scale_of(low_half(largest), over_all[0], inverse[0])
    upper_byte, upper_multiplier, upper_limit = scale_of(
        high_half(largest), over_all[1], inverse[1]
    )
    limits = _limits(limit, upper_limit, p_seed)
    quarters = ()
    for quarter in tl.static_range(4):
        lower, upper = (), ()
        for i in tl.static_range(4):
            pair = limited_pair(pairs[4 * quarter + i], limits)
            lower += (low_half(pair) * multiplier,)
            upper += (high_half(pair) * upper_multiplier,)
        signs = four_signs(pairs[4 * quarter : 4 * quarter + 4])
        if p_seed is None:
            codes = four_codes(lower, upper)
        else:
            codes = four_drawn(lower, upper, (random[quarter], upper_random[quarter]), multiplier)
        quarters += (codes | signs,)
    words, upper_words = (), ()
    for half in tl.static_range(2):
        words += (lower_halves(quarters[2 * half], quarters[2 * half + 1]),)
        upper_words += (upper_halves(quarters[2 * half], quarters[2 * half + 1]),)
    return byte, words, upper_byte, upper_words


def are_pairs(x_MK: Tensor, candidates: int) -> bool:
    """Whether a matrix can be read in words, and its cast is one that works on pairs."""
    if torch.compiler.is_compiling():
        return False  # where a matrix will lie is not known then
    is_even = x_MK.shape[1] % 2 == 0 and x_MK.stride(0) % 2 == 0 and x_MK.data_ptr() % 4 == 0
    return x_MK.dtype is torch.bfloat16 and is_even and candidates == 1
