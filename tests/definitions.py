"""The number formats by definition, in numpy and exact fractions, without the library.

A code is the *nearest* of all values that its format has, a tie going to the even code: the
values are listed from the bit fields, and the midpoints of neighbours are exact in float64.
A block's power of two is the smallest that is not below ``amax / 448``, found in the list of
all 255 of them.  A product of two float32 is exact in float64, so rounding it once more gives
the float32 product; quotients of scales go through :class:`fractions.Fraction`.

Letters: M rows, K columns, S blocks of 32, L steps of history, G groups.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import numpy as np

BLOCK = 32
FLOAT32_MAX = float(np.finfo(np.float32).max)
# Code: (bits of exponent, bits of mantissa, number of finite magnitudes).
FIELDS = {"e4m3": (4, 3, 127), "e5m2": (5, 2, 124)}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
NAN_CODE = 0x7F
POWERS = 2.0 ** (np.arange(255) - 127)  # of the E8M0 codes 0 to 254


@functools.cache
def magnitudes(code: str) -> np.ndarray:
    """The finite values of codes 0, 1, 2, ... in float64, where all of them are exact."""
    exponent_bits, mantissa_bits, count = FIELDS[code]
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for bits in range(count):
        exponent, mantissa = divmod(bits, 2**mantissa_bits)
        whole = 2**mantissa_bits if exponent else 0
        values.append((whole + mantissa) * 2.0 ** (max(exponent, 1) - bias - mantissa_bits))
    return np.array(values)


@functools.cache
def midpoints(code: str) -> np.ndarray:
    """The magnitudes that lie as near to one code as to the next."""
    values = magnitudes(code)
    return (values[1:] + values[:-1]) / 2


def encode(x: np.ndarray, code: str) -> np.ndarray:
    """The byte of each float32: the nearest, the even one of two, the last beyond all."""
    with np.errstate(invalid="ignore"):
        magnitude = np.abs(x.astype(np.float32).astype(np.float64))
    middle = midpoints(code)
    nearest = np.searchsorted(middle, magnitude, side="left")
    is_tie = (nearest < len(middle)) & (middle[np.minimum(nearest, len(middle) - 1)] == magnitude)
    nearest = nearest + (is_tie & (nearest % 2 == 1))
    signed = nearest + 0x80 * np.signbit(x)
    return np.where(np.isnan(x), NAN_CODE, signed).astype(np.uint8)


def decode(codes: np.ndarray, code: str) -> np.ndarray:
    """The value of each byte in float64."""
    count = FIELDS[code][2]
    table = np.full(128, np.nan)
    table[:count] = magnitudes(code)
    if code == "e5m2":
        table[count] = np.inf
    return np.where(codes & 0x80, -1.0, 1.0) * table[codes & 0x7F]


def float32(exact: np.ndarray) -> np.ndarray:
    """Round float64 to float32; too large is infinity."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return exact.astype(np.float32)


def product(a: np.ndarray, b: np.ndarray | float) -> np.ndarray:
    """The float32 product of two float32: their exact product, rounded once."""
    with np.errstate(invalid="ignore"):
        return float32(a.astype(np.float64) * b)


def nearest_float32(exact: Fraction) -> float:
    """The float32 nearest to a positive fraction, ties to even; infinity if it is too large."""
    if exact == 0:
        return 0.0
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
    if Fraction(2) ** exponent > exact:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(exact / step) * step  # Python rounds a half to even
    return math.inf if rounded > Fraction(FLOAT32_MAX) else float(rounded)


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16 and give it as float32: add half an ulp, cut the low half."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return np.where(np.isnan(x), np.float32(np.nan), bits.astype(np.uint32).view(np.float32))


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Float32 values as a tensor of ``dtype`` holds them, as float64."""
    if dtype == "bfloat16":
        return bfloat16(x).astype(np.float64)
    with np.errstate(over="ignore"):
        return x.astype(dtype).astype(np.float64)


# --- one scale for a tensor --------------------------------------------------------------------


def amax(x: np.ndarray) -> float:
    """The largest magnitude in float32; NaN does not count."""
    magnitude = np.abs(float32(x))
    return float(magnitude[~np.isnan(magnitude)].max(initial=0.0))


def scale_from_amax(
    amax: float, largest: float, *, epsilon: float = 0.0, infinite: float = FLOAT32_MAX
) -> float:
    """``largest / amax`` in float32; one if amax is zero, infinite or NaN."""
    if amax < epsilon:
        amax = float(np.float32(epsilon))
    if not math.isfinite(amax) or amax == 0:
        return 1.0
    scale = nearest_float32(Fraction(largest) / Fraction(amax))
    return infinite if math.isinf(scale) else scale


def power_of_two_below(scale: float) -> float:
    """The largest power of two that is not above a normal ``scale``."""
    return math.ldexp(1.0, math.frexp(scale)[1] - 1)


def inverse(scale: float) -> float:
    """One over ``scale`` in float32."""
    return nearest_float32(1 / Fraction(scale))


def float8(x: np.ndarray, scale: float, code: str) -> np.ndarray:
    """Codes of the float32 product of ``x`` and ``scale``."""
    return encode(product(float32(x), scale), code)


def float8_values(codes: np.ndarray, scale_inv: float, code: str) -> np.ndarray:
    """Float32 values of codes."""
    return product(decode(codes, code), scale_inv)


def delayed_update(
    history: list[float], scale: float, amax: float, largest: float, *, most_recent: bool = False
) -> tuple[list[float], float]:
    """The next history and scale after a step whose largest magnitude was ``amax``.

    The maximum is that of the rolled history, *before* its slot 0 is cleared.
    """
    last = amax if amax != 0 else history[0]
    if last == 0:
        return list(history), scale
    rolled = [*history[1:], last]
    seen = last if most_recent else max(rolled)
    if math.isfinite(seen):
        quotient = nearest_float32(Fraction(largest) / Fraction(seen))
        scale = FLOAT32_MAX if math.isinf(quotient) else quotient
    return [0.0, *rolled[1:]], scale


# --- blocks of 32 with a power of two ----------------------------------------------------------


def mx_exponent(amax: np.ndarray) -> np.ndarray:
    """The E8M0 byte: the smallest power of two not below ``amax / 448`` (in float32)."""
    share = product(amax, float(np.float32(1 / 448))).astype(np.float64)
    smallest = np.minimum(np.searchsorted(POWERS, share, side="left"), 254)
    return np.where(np.isnan(share), 255, smallest).astype(np.uint8)


def mx_power(exponent: np.ndarray) -> np.ndarray:
    """The power of two of each E8M0 byte in float64; 255 is NaN."""
    return np.append(POWERS, np.nan)[exponent]


def mx_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and exponents of blocks along rows."""
    codes, exponents = mx_columns(x.T)
    return codes.T, exponents.T


def mx_columns(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and exponents of blocks down columns."""
    x = float32(x)
    codes = np.zeros(x.shape, np.uint8)
    exponents = np.zeros((-(-len(x) // BLOCK), x.shape[1]), np.uint8)
    for block in range(len(exponents)):
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        magnitude = np.where(np.isnan(x[rows]), 0, np.abs(x[rows]))
        exponents[block] = mx_exponent(magnitude.max(0))
        codes[rows] = encode(product(x[rows], 1 / mx_power(exponents[block])), "e4m3")
    return codes, exponents


def mx_group_columns(x: np.ndarray, counts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """As :func:`mx_columns`, anew in every group; exponents as many as the host can know of."""
    codes = np.zeros(x.shape, np.uint8)
    exponents = np.zeros((-(-len(x) // BLOCK) + len(counts), x.shape[1]), np.uint8)
    row = block = 0
    for count in counts:
        group_codes, group_exponents = mx_columns(x[row : row + count])
        codes[row : row + count] = group_codes
        exponents[block : block + len(group_exponents)] = group_exponents
        row, block = row + count, block + len(group_exponents)
    return codes, exponents


def mx_row_values(codes: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Float32 values of :func:`mx_rows`."""
    return mx_column_values(codes.T, exponents.T).T


def mx_column_values(codes: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Float32 values of :func:`mx_columns`."""
    values = np.zeros(codes.shape, np.float32)
    for row in range(len(codes)):
        values[row] = product(decode(codes[row], "e4m3"), mx_power(exponents[row // BLOCK]))
    return values


def mx_group_column_values(
    codes: np.ndarray, exponents: np.ndarray, counts: list[int]
) -> np.ndarray:
    """Float32 values of :func:`mx_group_columns`; zero past the last group."""
    values = np.zeros(codes.shape, np.float32)
    row = block = 0
    for count in counts:
        rows = slice(row, row + count)
        values[rows] = mx_column_values(codes[rows], exponents[block:])
        row, block = row + count, block + -(-count // BLOCK)
    return values
