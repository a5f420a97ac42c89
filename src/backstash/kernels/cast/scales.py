"""The scale that brings a largest magnitude to the largest code, inside a kernel.

Any float32 is a division, correctly rounded.  A power of two needs none: its exponent is the
difference of two exponents, one less where the mantissa of the magnitude is the larger one.
A quotient below a power of two is at least half a step of float32 below it, so the division
that defines the scale would not have rounded it up either.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from backstash.kernels.cast.exponents import multiplier_of
from backstash.kernels.reference.cast import FLOAT32_MAX

#: What a kernel needs for a scale: the largest code, the least magnitude, the scale where the
#: quotient is too large, and one for any float32, None for a power of two.
Scaling = tuple[float, float, float, int | None]


@triton.jit
def exponent_for(amax, largest, value_for_inf):
    """The exponent, as float32 stores it, of the power of two that brings ``amax`` to ``largest``.

    127, which means one, where ``amax`` says nothing: zero, infinity and NaN.
    """
    bits = amax.to(tl.int32, bitcast=True)
    # Both fields at once: the mantissas borrow one from the exponents where that of amax is larger.
    one_times_largest = tl.cast(largest, tl.uint32, bitcast=True) + 0x3F800000
    exponent = ((one_times_largest - bits.to(tl.uint32)) >> 23).to(tl.int32)
    # The quotient of a subnormal is too large for float32, like what comes past 254.
    most = tl.cast(value_for_inf, tl.int32, bitcast=True) >> 23
    exponent = tl.where((exponent > 254) | (bits < 0x800000), most, exponent)
    return tl.where((bits > 0) & (bits < 0x7F800000), exponent, 127)


@triton.jit
def scale_of(amax, largest, epsilon, value_for_inf, exact):
    """The factor that brings ``amax`` to ``largest``, and its inverse.

    Both are one where ``amax`` says nothing: zero, infinity and NaN.
    """
    # A compiler of torch hands numbers over as float64.
    largest = tl.cast(largest, tl.float32)
    epsilon = tl.cast(epsilon, tl.float32)
    value_for_inf = tl.cast(value_for_inf, tl.float32)
    amax = tl.where(amax < epsilon, epsilon, amax)
    if exact is None:
        exponent = exponent_for(amax, largest, value_for_inf)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = multiplier_of(exponent)
    else:
        scale = tl.div_rn(tl.zeros_like(amax) + largest, amax)
        scale = tl.where(scale == float("inf"), value_for_inf, scale)
        scale = tl.where((amax > 0) & (amax < float("inf")), scale, 1.0)
        inverse = tl.div_rn(tl.zeros_like(scale) + 1, scale)
    return scale, inverse


def scaling_of(
    code_dtype: torch.dtype,
    epsilon: float,
    *,
    power_of_two: bool,
    value_for_inf: float = FLOAT32_MAX,
) -> Scaling:
    """What :func:`scale_of` needs for these codes."""
    return torch.finfo(code_dtype).max, float(epsilon), value_for_inf, None if power_of_two else 1
