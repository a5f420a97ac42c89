"""The arithmetic of NVFP4 on pairs of bfloat16 values inside a Triton kernel.

Two bfloat16 values side by side are one word, and a GPU has instructions that work on both
halves of a word: the largest magnitude of blocks and the limit on values are found so.  Each
value is then scaled and rounded in float32, as the format is defined, and two codes become a
word again as float16, in which a code at 2^-14 of its value has its bits from the tenth on.

No comparison rounds here.  A number from 8 on plus 2^-19 of a value is rounded to steps of
a half of that value, from 16 on to steps of one, from 32 on to steps of two.  ``11.875 +
value^2`` is such a number: it reaches 16 and 32 a little after the value does 2 and 4, where
either step gives the same code.  What is added beyond a code's second bit where a sum crosses
into wider steps is cut off with the bits below the code.

Where codes are drawn, values are cut to float16, see ``nvfp4_codes.drawn``.
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
from backstash.kernels.nvfp4_codes import LARGEST_FLOAT, TINY, random_words

# The largest bfloat16, and one that the largest multiplier brings a little beyond 6.
_LARGEST_LIMIT = tl.constexpr(3.3895313892515355e38)
_SMALLEST_LIMIT = tl.constexpr(1.5078125 * 2.0**-126)


@triton.jit
def limited_pair(pair, limits):
    """Values of at most the limit, with their sign; a NaN has none."""
    return tl.inline_asm_elementwise(
        "min.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [pair, limits],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def narrow_pair(lower, upper):
    """Two float32 values, rounded to bfloat16, as one word."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [lower, upper],
        dtype=tl.int32, is_pure=True, pack=1,
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
def _half_pair(lower, upper):
    """Two float32 values, cut to what float16 can be, as one word."""
    return tl.inline_asm_elementwise(
        "cvt.rz.f16x2.f32 $0, $2, $1;", "=r,f,f", [lower, upper],
        dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _exact_pair(lower, upper):
    """Two float32 values that float16 can be after they are made 32 times as large."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t, m; mov.b32 m, 0x50005000; cvt.rn.f16x2.f32 t, $2, $1;"
        " mul.rn.f16x2 $0, t, m; }", "=r,f,f", [lower, upper],
        dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _six_at_most(halves):
    """Magnitudes of two float16 values of at most 6 * 2^-14; that of a NaN is the limit."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t, m; mov.b32 m, 0x0E000E00; abs.f16x2 t, $1; min.f16x2 $0, t, m; }",
        "=r,r", [halves], dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _high_bytes(one, other):
    """The higher bytes of the halves of two words."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x7531;", "=r,r,r", [one, other],
        dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _odd_bytes(word):
    """Bytes 1 and 3 of a word as two halves."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, 0x4341;", "=r,r", [word],
        dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def sign_bytes(one, other):
    """The higher bytes of the lower halves of two words, then those of the upper halves."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x7351;", "=r,r,r", [one, other],
        dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _nibbles(evens, odds, even_signs, odd_signs):
    """Nibbles of bytes with a code from their second bit on, and signs from highest bits."""
    # Each word but the first two is chosen bit by bit from two others by a mask.
    return tl.inline_asm_elementwise(
        "{ .reg .b32 c, o, s; shr.u32 c, $1, 1; shl.b32 o, $2, 3; shr.u32 s, $3, 4;"
        " lop3.b32 c, c, o, 0x0F0F0F0F, 0xE4; lop3.b32 s, s, $4, 0x0F0F0F0F, 0xE4;"
        " lop3.b32 $0, c, s, 0x77777777, 0xE4; }",
        "=r,r,r,r,r", [evens, odds, even_signs, odd_signs],
        dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _rounded(size):
    """2^-19 of what a code can be."""
    t = tl.fma(size, size, 11.875)
    return tl.fma(size, 2.0**-19, t) - t


@triton.jit
def nearest_word(x, even_signs, odd_signs):
    """The codes of eight magnitudes."""
    places = ()
    for half in tl.static_range(2):
        for i in tl.static_range(2):
            one, other = _rounded(x[4 * half + i]), _rounded(x[4 * half + i + 2])
            places += (_exact_pair(one, other),)
    evens, odds = _high_bytes(places[0], places[2]), _high_bytes(places[1], places[3])
    return _nibbles(evens, odds, even_signs, odd_signs)


@triton.jit
def drawn_word(x, random):
    """The codes of eight values that are 2^-14 of their size, by two words of random bytes."""
    signs, places = (), ()
    for half in tl.static_range(2):
        word = random[half]
        evens = _half_pair(x[4 * half], x[4 * half + 2])
        odds = _half_pair(x[4 * half + 1], x[4 * half + 3])
        signs += (evens, odds)
        places += (
            _six_at_most(evens) + (word & 0x00FF00FF) * 2,
            _six_at_most(odds) + _odd_bytes(word) * 2,
        )
    evens, odds = _high_bytes(places[0], places[2]), _high_bytes(places[1], places[3])
    even_signs, odd_signs = _high_bytes(signs[0], signs[2]), _high_bytes(signs[1], signs[3])
    return _nibbles(evens, odds, even_signs, odd_signs)


@triton.jit
def inverse_of(value):
    """One over each value, rounded to nearest: fewer instructions than a division."""
    return tl.inline_asm_elementwise(
        "rcp.rn.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _e4m3_pair(lower, upper):
    """The nearest E4M3 values of two floats: their bytes in one word, and each as float32."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 c, l, u; .reg .b32 v; cvt.rn.satfinite.e4m3x2.f32 c, $4, $3;"
        " cvt.rn.f16x2.e4m3x2 v, c; mov.b32 {l, u}, v; cvt.f32.f16 $1, l; cvt.f32.f16 $2, u;"
        " cvt.u32.u16 $0, c; }", "=r,=f,=f,f,f", [lower, upper],
        dtype=(tl.int32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _scales_of(lower, upper, over_alls):
    """The bytes of the scales of two blocks with some largest magnitudes, and both scales."""
    # The smaller of a NaN and a number is the number.
    lower = tl.minimum(lower * (over_alls[0] * (1.0 / 6.0)), 448.0)
    upper = tl.minimum(upper * (over_alls[1] * (1.0 / 6.0)), 448.0)
    return _e4m3_pair(lower, upper)


@triton.jit
def _multiplier_of(scale, inverse):
    """What the values of a block are multiplied by, and their limit.

    The limit is scaled to little more than 6, so values beyond it have its code.
    """
    product = scale * inverse
    multiplier = tl.minimum(inverse_of(product), LARGEST_FLOAT)
    return multiplier, tl.maximum(product * 6.05, _SMALLEST_LIMIT)


@triton.jit
def scale_of(largest, over_all, inverse):
    """The byte of a block's scale, what its values are multiplied by, and their limit."""
    bytes, scale, _ = _scales_of(largest, largest, (over_all, over_all))
    multiplier, limit = _multiplier_of(scale, inverse)
    return bytes & 0xFF, multiplier, limit


@triton.jit
def largest_pair(pairs):
    """The largest magnitude in each half of some pairs; a NaN does not count."""
    largest = pairs[0] & 0
    for i in tl.static_range(len(pairs)):
        largest = larger_pair(largest, pairs[i])
    return largest & 0x7FFF7FFF


@triton.jit
def _limits(lower, upper):
    """Two limits as a pair; an infinity has the largest code."""
    lower, upper = tl.minimum(lower, _LARGEST_LIMIT), tl.minimum(upper, _LARGEST_LIMIT)
    return narrow_pair(lower, upper)


@triton.jit
def row_words(pairs, multiplier, limit, seed, i_block, STREAM: tl.constexpr):
    """The codes of blocks of eight pairs as two words.

    With a seed, block ``i_block`` of stream ``STREAM`` is rounded by its own random bytes.
    """
    if seed is not None:
        random = random_words(seed, i_block, pairs[0] & 0x7FFFFFFF, STREAM)
    words = ()
    if seed is not None:
        multiplier *= TINY
        for half in tl.static_range(2):
            x = ()
            for j in tl.static_range(4):
                pair = pairs[4 * half + j]
                x += (low_half(pair) * multiplier, high_half(pair) * multiplier)
            words += (drawn_word(x, (random[2 * half], random[2 * half + 1])),)
    else:
        limits = _limits(limit, limit)
        for half in tl.static_range(2):
            x, limited = (), ()
            for j in tl.static_range(4):
                pair = limited_pair(pairs[4 * half + j], limits)
                x += (low_half(pair) * multiplier, high_half(pair) * multiplier)
                limited += (pair,)
            one, other = sign_bytes(limited[0], limited[1]), sign_bytes(limited[2], limited[3])
            words += (nearest_word(x, lower_halves(one, other), upper_halves(one, other)),)
    return words


@triton.jit
def column_words(pairs, over_all, inverse, seed, i_block):
    """Scales and codes of two columns of 16 rows of pairs, those of each column a tuple.

    With a seed, ``i_block`` is the block of the first of two columns; the other is the next.
    """
    if seed is not None:
        positive = pairs[0] & 0x7FFFFFFF
    largest = largest_pair(pairs)
    bytes, scale, upper_scale = _scales_of(low_half(largest), high_half(largest), over_all)
    multiplier, limit = _multiplier_of(scale, inverse[0])
    upper_multiplier, upper_limit = _multiplier_of(upper_scale, inverse[1])
    words, upper_words = (), ()
    if seed is not None:
        multiplier *= TINY
        upper_multiplier *= TINY
        random = random_words(seed, i_block, positive, 1)
        for half in tl.static_range(2):
            x = ()
            for i in tl.static_range(8):
                x += (low_half(pairs[8 * half + i]) * multiplier,)
            words += (drawn_word(x, (random[2 * half], random[2 * half + 1])),)
        random = random_words(seed, i_block + 1, positive, 1)
        for half in tl.static_range(2):
            x = ()
            for i in tl.static_range(8):
                x += (high_half(pairs[8 * half + i]) * upper_multiplier,)
            upper_words += (drawn_word(x, (random[2 * half], random[2 * half + 1])),)
    else:
        limits = _limits(limit, upper_limit)
        for half in tl.static_range(2):
            lower, upper, limited = (), (), ()
            for i in tl.static_range(8):
                pair = limited_pair(pairs[8 * half + i], limits)
                lower += (low_half(pair) * multiplier,)
                upper += (high_half(pair) * upper_multiplier,)
                limited += (pair,)
            even, even_ = sign_bytes(limited[0], limited[2]), sign_bytes(limited[4], limited[6])
            odd, odd_ = sign_bytes(limited[1], limited[3]), sign_bytes(limited[5], limited[7])
            signs = lower_halves(even, even_), lower_halves(odd, odd_)
            words += (nearest_word(lower, signs[0], signs[1]),)
            signs = upper_halves(even, even_), upper_halves(odd, odd_)
            upper_words += (nearest_word(upper, signs[0], signs[1]),)
    return bytes & 0xFF, words, bytes >> 8, upper_words


@triton.jit
def _pair_of_codes(words, at: tl.constexpr):
    """The values of the nibbles of a word that begin at bits ``at`` and ``at + 16``."""
    # As parts of float16 they are 2^-14 of what they mean.
    codes = words << (9 - at) if at < 12 else words >> 3
    halves = (codes & 0x0E000E00) | ((words << (12 - at)) & 0x80008000)
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t, m; .reg .b16 l, u; mov.b32 m, 0x74007400; mul.rn.f16x2 t, $2, m;"
        " mov.b32 {l, u}, t; cvt.f32.f16 $0, l; cvt.f32.f16 $1, u; }", "=f,=f,r", [halves],
        dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def values_of_pairs(words, factor):
    """The 16 values of blocks from two words of eight nibbles, each times ``factor``."""
    y = ()
    for half in tl.static_range(2):
        lower, upper = (), ()
        for i in tl.static_range(4):
            pair = _pair_of_codes(words[half], 4 * i)
            lower += (pair[0] * factor,)
            upper += (pair[1] * factor,)
        y += lower + upper
    return y


def are_pairs(x_MK: Tensor, candidates: int) -> bool:
    """Whether a matrix can be read in words, and its cast is one that works on pairs."""
    if torch.compiler.is_compiling():
        return False  # where a matrix will lie is not known then
    is_even = x_MK.shape[1] % 2 == 0 and x_MK.stride(0) % 2 == 0 and x_MK.data_ptr() % 4 == 0
    return x_MK.dtype is torch.bfloat16 and is_even and candidates == 1
