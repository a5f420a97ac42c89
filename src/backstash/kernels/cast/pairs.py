"""Two bfloat16 values in a word of 32 bits, as they lie in memory, inside a Triton kernel.

Half as many registers hold a matrix, and one instruction compares or multiplies two values.
The lower half of a word is the even column.  A product with a power of two is exact, but for
what is too small for bfloat16, and that is zero in every format of eight bits.
"""

# What is known when a kernel is compiled has a type that this checker takes for Python's.
# pyright: reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def are_words(x_MK: Tensor) -> bool:
    """Whether rows of ``x_MK`` are words that can be loaded 16 bytes at once."""
    if torch.compiler.is_compiling():
        return False  # where a matrix will lie is not known then
    whole = x_MK.shape[1] % 32 == 0 and x_MK.stride(0) % 32 == 0 and x_MK.stride(1) == 1
    return x_MK.dtype == torch.bfloat16 and whole and x_MK.data_ptr() % 16 == 0


@triton.jit
def larger_pair(one, other):
    """Of both halves the larger magnitude, with some sign: NaN only where both are NaN."""
    return tl.inline_asm_elementwise(
        "max.xorsign.abs.bf16x2 $0, $1, $2;",
        "=r,r,r",
        [one, other],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def magnitudes(pair):
    """The magnitudes of both halves, float32."""
    return low_half(pair & 0x7FFF7FFF), high_half(pair & 0x7FFF7FFF)


@triton.jit
def low_half(pair):
    """The value of the even column, float32."""
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_half(pair):
    """The value of the odd column, float32."""
    return (pair & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def scaled_pair(pair, low_exponent, high_exponent):
    """Both halves times powers of two, which are given as float32 stores their exponents."""
    scale = (high_exponent << 23) | (low_exponent << 7)
    # Plus a negative zero, which changes nothing: older GPUs have no product of pairs alone.
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;",
        "=r,r,r,r",
        [pair, scale, -0x7FFF8000],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def codes_of(pair, E5M2: tl.constexpr):
    """The codes of both halves, saturating, side by side in 16 bits."""
    # One register takes the codes of two pairs.
    CAST: tl.constexpr = "cvt.rn.satfinite.e5m2x2.f32" if E5M2 else "cvt.rn.satfinite.e4m3x2.f32"
    return tl.inline_asm_elementwise(
        "{ .reg .b16 one, two; "
        + CAST
        + " one, $3, $1; "
        + CAST
        + " two, $4, $2; mov.b32 $0, {one, two}; }",
        "=r,r,r,r,r",
        [low_half(pair), high_half(pair)],
        dtype=tl.int16,
        is_pure=True,
        pack=2,
    )
