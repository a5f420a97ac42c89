"""The arithmetic of NVFP4 inside a Triton kernel: scales, codes and values of a block of 16.

The N blocks that a program works on are a tuple of 16 tensors ``(N,)``, one for each place in
a block.  So a thread has whole blocks in its registers, sums go along a block in the order of
its places, and two places side by side make a byte without leaving a thread.

No cast rounds here.  A float32 plus a power of two is rounded to a multiple of the last bit
of that sum, ties to even; the low bits of the sum then count the multiples.  What is added
has the exponent of the value, but no less than that of the smallest normal code: below it
the steps of a format stay equal.
"""

# What is known when a kernel is compiled has a type that this checker takes for Python's.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

from backstash.kernels.reference.cast import FLOAT32_MAX

LARGEST_FLOAT = tl.constexpr(FLOAT32_MAX)
# The largest code times the largest scale.
_LARGEST = tl.constexpr(448.0 * 6.0)
# Half more than 2^23, and four: a code less four, or plus four with a sign, is a nibble more
# than the float whose bits are ``_EXTRA``.
_WHOLE = tl.constexpr(12582912.0 + 4.0)
_EXTRA = tl.constexpr(0x4B400000)
# What brings values to where float16 has the exponents and the steps of codes.
TINY = tl.constexpr(2.0**-14)


@triton.jit
def over_all_of(amax):
    """The factor that brings ``amax`` to the largest code times the largest scale."""
    factor = tl.div_rn(tl.zeros_like(amax) + _LARGEST, amax)
    factor = tl.minimum(factor, LARGEST_FLOAT)
    return tl.where((amax == 0) | (factor == 0), 1.0, factor)


@triton.jit
def e4m3(value):
    """The nearest E4M3 value of a float that is not negative, and its byte."""
    value = tl.minimum(value, 448.0)
    exponent = tl.maximum(value.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
    shift_bits = exponent + (20 << 23)
    shift = shift_bits.to(tl.float32, bitcast=True)
    moved = value + shift
    byte = moved.to(tl.int32, bitcast=True) - shift_bits + ((exponent - (121 << 23)) >> 20)
    return moved - shift, byte


@triton.jit
def multiplier_of(scale, over_all):
    """What a value is multiplied by before its cast."""
    one = tl.zeros_like(over_all) + 1.0
    product = scale * tl.div_rn(one, over_all)
    one = tl.zeros_like(product) + 1.0
    return tl.minimum(tl.div_rn(one, product), LARGEST_FLOAT)


@triton.jit
def factor_of(scale, amax):
    """What a code is multiplied by."""
    return scale * amax * (1.0 / _LARGEST)


@triton.jit
def _rounded(size):
    """The magnitude of the nearest code, the even one of two, for sizes up to 6."""
    bits = size.to(tl.int32, bitcast=True) & 0x7F800000
    # A power of two whose last bit is the step of the codes around the value.
    shift = tl.maximum(bits + (22 << 23), 149 << 23).to(tl.float32, bitcast=True)
    return (size + shift) - shift


@triton.jit
def nearest(scaled):
    """The nearest nibble, the even one of two, plus ``_EXTRA``; too large and NaN are 6.

    Codes rise by one each half up to 2, each whole from 2 to 4, each two from there on; the
    line that rises slowest is the lowest where it holds, so the code is the least of the three.
    """
    size = tl.abs(scaled)
    # Sums beyond 2^23 are rounded to whole numbers, ties to even.
    halves, wholes = tl.fma(size, 2.0, _WHOLE), size + (_WHOLE + 2.0)
    # The smaller of a NaN and a number is the number.
    slow = tl.minimum(tl.fma(size, 0.5, _WHOLE + 4.0), _WHOLE + 7.0)
    code = tl.minimum(tl.minimum(halves, wholes), slow)
    # A GPU computes a NaN without a sign.
    four = (scaled.to(tl.uint32, bitcast=True) & 0x80000000) | 0x40800000
    return (code - four.to(tl.float32, bitcast=True)).to(tl.uint32, bitcast=True)


@triton.jit
def drawn(tiny, byte):
    """One of the two nibbles around each value, the nearer the likelier.

    At 2^-14 of their size, values have bits as float16 that rise as codes do, 512 from code to
    code.  What lies between two codes is cut to a multiple of 1/512, which a random multiple of
    1/256 carries to the next code exactly where the whole would be carried.
    """
    # The smaller of a NaN and a number is the number.
    size = tl.minimum(tl.abs(tiny), 6.0 * TINY)
    bits = size.to(tl.int32, bitcast=True)
    # Below the smallest normal float16 its bits count multiples of 2^-24.
    place = tl.where(size < TINY, (size * 2.0**24).to(tl.int32), (bits >> 13) - (112 << 10))
    code = ((place + 2 * byte.to(tl.int32)) >> 9).to(tl.uint32)
    return code | ((tiny.to(tl.uint32, bitcast=True) >> 28) & 8)


@triton.jit
def _value_of(nibble):
    """The value of a nibble as float32."""
    # Exponent and mantissa of a nibble, in their place in a float, are 2^-126 of its value.
    bits = ((nibble & 7) << 22) | ((nibble & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def values_of(pairs, factor):
    """The 16 values of blocks from their eight bytes, int32, each times ``factor``."""
    y = ()
    for i in tl.static_range(8):
        y += (_value_of(pairs[i]) * factor, _value_of(pairs[i] >> 4) * factor)
    return y


@triton.jit
def values_of_words(words, factor):
    """The same from two words of eight nibbles."""
    y = ()
    for i in tl.static_range(16):
        y += (_value_of((words[i // 8] >> (4 * (i % 8))).to(tl.int32, bitcast=True)) * factor,)
    return y


@triton.jit
def _error(x, scale, over_all, amax):
    """Squared error of each block, its places in order."""
    multiplier, factor = multiplier_of(scale, over_all), factor_of(scale, amax)
    error = tl.zeros_like(x[0])
    for i in tl.static_range(16):
        size = tl.abs(x[i])
        scaled = tl.minimum(size * multiplier, 6.0)
        difference = size - _rounded(scaled) * factor
        error += tl.where(difference == difference, difference * difference, 0.0)
    return error


@triton.jit
def largest_of(x):
    """The largest magnitude of each block; a NaN does not count."""
    largest = tl.zeros_like(x[0])
    for i in tl.static_range(16):
        # The maximum with a NaN is the other operand.
        largest = tl.maximum(largest, tl.abs(x[i]))
    return largest


@triton.jit
def _over_rows(error):
    """Errors of tiles from those of their 16 rows, which lie one after another, by halves."""
    for _step in tl.static_range(4):
        halves = tl.reshape(error, [2, error.shape[0] // 2])
        upper, lower = tl.split(tl.permute(halves, [1, 0]))
        error = upper + lower
    return error


@triton.jit
def scales_of(x, amax, TILES: tl.constexpr, CANDIDATES: tl.constexpr):
    """The byte of each block's scale, and what its values are multiplied by.

    If ``TILES``, the blocks are the rows of ``N / 16`` tiles, first those that are the first in
    their tile, and a tile has one scale.
    """
    N: tl.constexpr = x[0].shape[0]
    largest = largest_of(x)
    if TILES:
        largest = tl.max(tl.reshape(largest, [16, N // 16]), 0)
    over_all = over_all_of(amax)
    if CANDIDATES == 1:
        # The product in brackets is formed first.
        scale, byte = e4m3(largest * (over_all * (1.0 / 6.0)))
    else:
        sixth = tl.div_rn(largest, tl.zeros_like(largest) + 6.0) * over_all
        six, six_byte = e4m3(sixth)
        four, four_byte = e4m3(sixth * 1.5)
        error_of_six = _error(x, of_rows(six, N), over_all, amax)
        error_of_four = _error(x, of_rows(four, N), over_all, amax)
        if TILES:
            error_of_six, error_of_four = _over_rows(error_of_six), _over_rows(error_of_four)
        errs_less = error_of_four < error_of_six
        scale, byte = tl.where(errs_less, four, six), tl.where(errs_less, four_byte, six_byte)
    return byte, of_rows(multiplier_of(scale, over_all), N)


@triton.jit
def of_rows(value, N: tl.constexpr):
    """What tiles have, for each of their rows; what ``N`` blocks have stays."""
    if value.shape[0] != N:
        value = tl.broadcast_to(value[None, :], [16, N // 16])
        value = tl.reshape(value, [N])
    return value


@triton.jit
def load_seed(p_seed):
    """Seed and offset, if there are any: loaded once, and before what they are used with."""
    seed = p_seed
    if p_seed is not None:
        seed = tl.load(p_seed), tl.load(p_seed + 1)
    return seed


@triton.jit
def random_words(seed, i_block, positive, STREAM: tl.constexpr):
    """The sixteen random bytes of each block as four words; ``positive`` are any such numbers."""
    seed, offset = seed
    # A sum with nothing of a value, so that the threads that have the values draw for them.
    i_block = i_block.to(tl.uint32) + tl.minimum(positive, 0).to(tl.uint32)
    zero = i_block * 0
    c0, c1 = i_block, zero + STREAM
    c2, c3 = zero + offset.to(tl.uint32), zero + (offset >> 32).to(tl.uint32)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    # Philox: both words of a product are one instruction.
    for _ in tl.static_range(10):
        first, second = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (second >> 32).to(tl.uint32) ^ c1 ^ k0, second.to(tl.uint32)
        c2, c3 = (first >> 32).to(tl.uint32) ^ c3 ^ k1, first.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def words_of(x, multiplier, seed, i_block, STREAM: tl.constexpr):
    """The codes of each block as two words of 32 bits, the first place in the lowest bits.

    With a seed, block ``i_block`` of stream ``STREAM`` is rounded by its own random bytes.
    """
    if seed is not None:
        random = random_words(seed, i_block, tl.abs(x[0]).to(tl.int32, bitcast=True), STREAM)
        multiplier *= TINY
    words = ()
    for i in tl.static_range(2):
        word = tl.zeros_like(x[0]).to(tl.uint32)
        for k in tl.static_range(8):
            scaled = x[8 * i + k] * multiplier
            if seed is None:
                word += nearest(scaled) << (4 * k)
            else:
                byte = (random[2 * i + k // 4] >> (8 * (k % 4))) & 0xFF
                word += drawn(scaled, byte) << (4 * k)
        if seed is None:
            word -= (_EXTRA * 0x11111111) & 0xFFFFFFFF
        words += (word,)
    return words


@triton.jit
def bytes_of(words):
    """The bytes of words, the lowest first, along a new last dimension of 4."""
    shape: tl.constexpr = words.shape
    if len(shape) == 2:
        shifts = tl.arange(0, 4)[None, None, :]
    else:
        shifts = tl.arange(0, 4)[None, None, None, :]
    return (tl.expand_dims(words, -1) >> (8 * shifts).to(tl.uint32)).to(tl.uint8)


@triton.jit
def together(parts, LOG: tl.constexpr):
    """``2^LOG`` tensors ``(N,)`` as one ``(N, 2^LOG)``."""
    N: tl.constexpr = parts[0].shape[0]
    for step in tl.static_range(LOG):
        # The first bit of a place is joined last, so that the places come in order.
        joined = ()
        for i in tl.static_range(1 << (LOG - 1 - step)):
            joined += (tl.join(parts[i], parts[i + (1 << (LOG - 1 - step))]),)
        parts = joined
    return tl.reshape(parts[0], [N, 1 << LOG])


@triton.jit
def apart(x, LOG: tl.constexpr):
    """``2^LOG`` tensors ``(N,)`` from one ``(N, 2^LOG)``, as a tuple."""
    N: tl.constexpr = x.shape[0]
    parts = (x,)
    for step in tl.static_range(LOG):
        # Even places and odd ones; what is still together then differs in a higher bit.
        evens, odds = (), ()
        for i in tl.static_range(1 << step):
            pairs = tl.reshape(parts[i], [N, 1 << (LOG - 1 - step), 2])
            even, odd = tl.split(pairs)
            evens += (even,)
            odds += (odd,)
        parts = evens + odds
    singles = ()
    for i in tl.static_range(1 << LOG):
        singles += (tl.reshape(parts[i], [N]),)
    return singles
