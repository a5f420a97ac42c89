"""Powers of two as E8M0 bytes, inside a Triton kernel.

A byte e means 2^(e - 127); 255 means NaN.  Byte 0 is 2^-127 and byte 254, the largest, has
2^-127 as its inverse: both are subnormal in float32, whose own exponent field is 0 there.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exponent_of(amax):
    """The byte of the smallest power of two that brings ``amax``, not NaN, to 448 or below."""
    bits = (amax * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    # Rounded up if any bit of the mantissa is set; infinity and what follows 254 become 254.
    exponent = tl.minimum((bits + 0x7FFFFF) >> 23, 254)
    # Code 0 means 2^-127, which covers subnormals up to half the smallest normal.
    return tl.where(bits <= 0x400000, 0, exponent)


@triton.jit
def multiplier_of(exponent):
    """``1 / 2^(exponent - 127)``, for exponents up to 254."""
    # The subnormal, which 254 means, is less than what any other exponent means.
    return tl.maximum((254 - exponent) << 23, 0x00400000).to(tl.float32, bitcast=True)


@triton.jit
def factor_of(exponent):
    """``2^(exponent - 127)``; 255 is NaN."""
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
    bits = tl.where(exponent == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)
