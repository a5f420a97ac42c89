"""NVFP4's factor over all blocks, and one over it, on a GPU.

The factor is the largest code times the largest scale, over the largest magnitude of all.  It is
rounded as a division rounds, and so is its inverse: an approximation, made better by what it
leaves over.  The compiler's own divisions are a branch each, which nothing can be moved over, and
a thread has eight of them where columns have magnitudes of their own.  Here what is too small
or too large for that way is behind one branch.
"""

# What is known when a kernel is compiled has a type that this checker takes for Python's.
# pyright: reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl


def _factors() -> str:
    """Machine code: the factors of two largest magnitudes, and one over each."""
    near, seldom = "", ""
    for c in range(2):
        factor, inverse, amax = f"${c}", f"${2 + c}", f"${4 + c}"
        # Quotients of numbers of a middling size, rounded to nearest by what they leave over.
        near += f"""
        rcp.approx.ftz.f32 y, {amax};
        neg.f32 z, {amax};
        fma.rn.f32 x, z, y, 0f3F800000;
        fma.rn.f32 y, y, x, y;
        mul.rn.f32 q, y, 0f45280000;
        fma.rn.f32 x, z, q, 0f45280000;
        fma.rn.f32 q, x, y, q;
        fma.rn.f32 x, z, q, 0f45280000;
        fma.rn.f32 {factor}, x, y, q;
        rcp.approx.ftz.f32 y, {factor};
        neg.f32 z, {factor};
        fma.rn.f32 x, z, y, 0f3F800000;
        fma.rn.f32 {inverse}, y, x, y;
        mov.b32 bits, {amax};
        sub.u32 bits, bits, 0x10000000;
        setp.gt{".or" if c else ""}.u32 is_far, bits, 0x5F000000{", is_far" if c else ""};"""
        seldom += f"""
        mov.f32 x, 0f45280000;
        div.rn.f32 x, x, {amax};
        min.f32 x, x, 0f7F7FFFFF;
        setp.eq.f32 p, {amax}, 0f00000000;
        setp.eq.or.f32 p, x, 0f00000000, p;
        selp.f32 {factor}, 0f3F800000, x, p;
        rcp.rn.f32 {inverse}, {factor};"""
    return f"""{{
        .reg .pred is_far, p;
        .reg .b32 bits;
        .reg .f32 x, y, z, q;{near}
        @!is_far bra DONE;{seldom}
        DONE:
        }}"""


_FACTORS = tl.constexpr(_factors())


@triton.jit
def factors_of_two(amax, other):
    """What brings two magnitudes to the largest code times the largest scale, and one over each."""
    one, two, inverse, other_inverse = tl.inline_asm_elementwise(
        _FACTORS, "=&f,=&f,=&f,=&f,f,f", [amax, other],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip
    return (one, two), (inverse, other_inverse)
