"""NVFP4 by definition, in numpy and exact fractions, without the library.

A code is the nearest of eight magnitudes, a tie going to the even code.  Quotients go through
fractions, products and sums of float32 through float64, which is wide enough that rounding it
once more gives the float32 result.  Philox is written with Python's whole numbers.

Letters: M rows, K columns, S blocks of rows, G groups, B = 16.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np

import definitions
from definitions import FLOAT32_MAX, float32, nearest_float32, product
from definitions_block import rectangles

BLOCK = 16
MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
MIDDLE = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
LARGEST = 448 * 6
NAN_CODE = 7
SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]


def encode(x: np.ndarray) -> np.ndarray:
    """The nibble of each float32: the nearest, the even one of two, 6 beyond all and for NaN."""
    with np.errstate(invalid="ignore"):
        magnitude = np.abs(x.astype(np.float64))
    nearest = np.searchsorted(MIDDLE, magnitude, side="left")
    is_tie = np.isin(magnitude, MIDDLE)
    nearest = nearest + (is_tie & (nearest % 2 == 1))
    return np.where(np.isnan(x), NAN_CODE, nearest + 8 * np.signbit(x)).astype(np.uint8)


def decode(nibbles: np.ndarray) -> np.ndarray:
    """The value of each nibble in float64."""
    return np.where(nibbles & 8, -1.0, 1.0) * MAGNITUDES[nibbles & 7]


def draw(tiny: np.ndarray, random: np.ndarray) -> np.ndarray:
    """One of the two nibbles around each float32 times 2^14, by a random byte."""
    with np.errstate(invalid="ignore"):
        magnitude = np.abs(tiny.astype(np.float64)) * 2**14
        # Between two codes the place of a value rises evenly.
        place = np.interp(magnitude, MAGNITUDES, np.arange(8))
        below = np.floor(place + random / 256)
    below = np.where(np.isnan(tiny), 0, below).astype(np.int64)
    return np.where(np.isnan(tiny), NAN_CODE, below + 8 * np.signbit(tiny)).astype(np.uint8)


def over_all(amax: float) -> float:
    """The factor from a tensor's largest magnitude."""
    if amax == 0 or math.isinf(amax):
        return 1.0
    factor = min(nearest_float32(Fraction(LARGEST) / Fraction(amax)), FLOAT32_MAX)
    return factor or 1.0


def e4m3(value: float) -> float:
    """The nearest E4M3 value of a float that is not negative, at most 448."""
    byte = definitions.encode(np.array(min(value, FLOAT32_MAX)), "e4m3")
    return float(definitions.decode(byte, "e4m3"))


def times(*factors: float) -> float:
    """A product of float32, each step rounded."""
    result = float(np.float32(factors[0]))
    for factor in factors[1:]:
        result = float(product(np.array(result), float(np.float32(factor))))
    return result


def multiplier(scale: float, amax: float) -> float:
    """What values of a block are multiplied by."""
    inverse = nearest_float32(1 / Fraction(over_all(amax)))
    divisor = times(scale, inverse)
    return min(nearest_float32(1 / Fraction(divisor)), FLOAT32_MAX) if divisor else FLOAT32_MAX


def factor(scale: float, amax: float) -> float:
    """What codes of a block are multiplied by."""
    return times(scale, amax, 1 / LARGEST)


def error(part: np.ndarray, scale: float, amax: float) -> float:
    """The squared error of a block: sixteen of a row in order, then rows by halves."""
    values = product(
        decode(encode(product(part, multiplier(scale, amax)))), factor(scale, amax)
    ).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        difference = float32(part - values).astype(np.float64)
        squares = float32(difference * difference)
    squares = np.where(np.isnan(squares), 0, squares).astype(np.float64)
    rows = [0.0] * BLOCK
    for i, row in enumerate(squares):
        for square in row:
            rows[i] = float(float32(np.array(rows[i] + square)))
    rows = rows if len(squares) > 1 else rows[:1]
    while len(rows) > 1:
        half = len(rows) // 2
        rows = [float(float32(np.array(a + b))) for a, b in zip(rows, rows[half:], strict=False)]
    return rows[0]


def block_scale(part: np.ndarray, amax: float, *, four_over_six: bool) -> float:
    """The E4M3 scale of a block."""
    largest = definitions.amax(part)
    if math.isinf(largest):
        return 448.0
    if not four_over_six:
        return e4m3(times(largest, times(over_all(amax), 1 / 6)))
    sixth = times(nearest_float32(Fraction(largest) / 6), over_all(amax))
    six, four = e4m3(sixth), e4m3(times(sixth, 1.5))
    return four if error(part, four, amax) < error(part, six, amax) else six


@dataclasses.dataclass
class Quantized:
    """Nibbles, scales as E4M3 bytes by place, and float32 values of a matrix."""

    nibbles: np.ndarray
    scales: dict[tuple[int, int], int]
    values: np.ndarray


def quantize(
    x: np.ndarray,
    block: tuple[int, int],
    amax: np.ndarray,
    counts: list[int] | None = None,
    *,
    four_over_six: bool = False,
    random: np.ndarray | None = None,
) -> Quantized:
    """Blocks of a matrix; ``amax`` and ``random`` have an entry for each element."""
    result = Quantized(np.zeros(x.shape, np.uint8), {}, np.zeros(x.shape, np.float32))
    for at in rectangles((x.shape[0], x.shape[1]), block, counts):
        where = at.rows, at.columns
        part, of_all = float32(x[where]), float(amax[where].flat[0])
        scale = block_scale(part, of_all, four_over_six=four_over_six)
        result.scales[at.place] = int(definitions.encode(np.array(scale), "e4m3"))
        of_block = multiplier(scale, of_all)
        if random is None:
            nibbles = encode(product(part, of_block))
        else:
            tiny = product(part, times(of_block, 2**-14))
            nibbles = draw(tiny, random[where])
        result.nibbles[where] = nibbles
        result.values[where] = product(decode(nibbles), factor(scale, of_all))
    return result


# --- the largest magnitude over the blocks, for each element -----------------------------------


def spread_amax(x: np.ndarray, block: tuple[int, int], counts: list[int] | None) -> np.ndarray:
    """The largest magnitude of each rectangle, at each of its elements."""
    amax = np.zeros(x.shape)
    for at in rectangles((x.shape[0], x.shape[1]), block, counts):
        amax[at.rows, at.columns] = definitions.amax(x[at.rows, at.columns])
    return amax


# --- the Hadamard transform --------------------------------------------------------------------


def hadamard() -> np.ndarray:
    """``diag(signs) H16 / 4`` by Sylvester's doubling."""
    matrix = np.ones((1, 1))
    while len(matrix) < BLOCK:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.array(SIGNS)[:, None] * matrix / 4


def moves(counts: list[int]) -> Iterator[tuple[slice, slice]]:
    """Where the rows of each group are, and where they are once groups are whole blocks."""
    start = padded = 0
    for count in counts:
        yield slice(start, start + count), slice(padded, padded + count)
        start, padded = start + count, padded + -(-count // BLOCK) * BLOCK


def padded_groups(x: np.ndarray, counts: list[int]) -> tuple[np.ndarray, list[int]]:
    """The rows of each group and zeros up to whole blocks, and how many rows those are."""
    sizes = [-(-count // BLOCK) * BLOCK for count in counts]
    padded = np.zeros((sum(sizes), x.shape[1]))
    for here, there in moves(counts):
        padded[there] = x[here]
    return padded, sizes


def unpadded(padded: np.ndarray, counts: list[int], rows: int) -> np.ndarray:
    """The rows of the groups again, with zeros past the last."""
    x = np.zeros((rows, padded.shape[1]), padded.dtype)
    for here, there in moves(counts):
        x[here] = padded[there]
    return x


def hadamard_sums(x: np.ndarray) -> np.ndarray:
    """The rows of ``x`` times Sylvester's matrix of ones, by its doubling, in float32."""
    if len(x) == 1:
        return x
    upper, lower = x[: len(x) // 2], x[len(x) // 2 :]
    with np.errstate(invalid="ignore"):
        halves = float32(upper + lower), float32(upper - lower)
    return np.concatenate([hadamard_sums(half.astype(np.float64)) for half in halves])


def mix(x: np.ndarray) -> np.ndarray:
    """Each sixteen rows as the sums and differences of themselves."""
    blocks = [hadamard_sums(x[first : first + BLOCK]) for first in range(0, len(x), BLOCK)]
    return np.concatenate([x[:0], *blocks])


def signs(x: np.ndarray) -> np.ndarray:
    """The sign of each row in its block."""
    return np.resize(np.array(SIGNS), len(x))[:, None]


def rotate(x: np.ndarray) -> np.ndarray:
    """Sixteen rows mixed, rounded to bfloat16 before and after; no zero is negative."""
    quarters = definitions.bfloat16(float32(x)).astype(np.float64) / 4
    mixed = mix(np.where(quarters == 0, 0.0, quarters * signs(x)))
    return definitions.bfloat16(float32(mixed)).astype(np.float64)


def rotate_back(x: np.ndarray) -> np.ndarray:
    """The transform undone in float32."""
    mixed = mix(product(x, 0.25).astype(np.float64))
    return float32(np.where(signs(x) < 0, 0.0 - mixed, mixed))


# --- bytes -------------------------------------------------------------------------------------


def pack(nibbles: np.ndarray) -> np.ndarray:
    """Bytes of each row, the lower nibble first; an odd one out is alone with a zero."""
    odd = nibbles.shape[1] % 2
    wide = np.pad(nibbles, ((0, 0), (0, odd)))
    return (wide[:, ::2] | wide[:, 1::2] << 4).astype(np.uint8)


def pack_columns(nibbles: np.ndarray, counts: list[int], multiple: int) -> np.ndarray:
    """Each group transposed, its rows padded to ``multiple``, one group after another."""
    buffer: list[np.ndarray] = []
    start = 0
    for count in counts:
        group = nibbles[start : start + count].T
        padded = np.pad(group, ((0, 0), (0, -count % multiple)))
        buffer.append(pack(padded).reshape(-1))
        start += count
    return np.concatenate(buffer)


# --- random bytes ------------------------------------------------------------------------------


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x32 with ten rounds."""
    c, k = list(counter), list(key)
    for _ in range(10):
        one, two = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(two >> 32) ^ c[1] ^ k[0], two % 2**32, (one >> 32) ^ c[3] ^ k[1], one % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def random_bytes(pair: tuple[int, int], block: int, stream: int) -> list[int]:
    """The sixteen bytes of a block; ``pair`` is seed and offset."""
    seed, offset = pair
    words = philox(
        [block % 2**32, stream, offset % 2**32, offset >> 32], [seed % 2**32, seed >> 32]
    )
    return [word >> shift & 255 for word in words for shift in (0, 8, 16, 24)]


def random_rows(shape: tuple[int, int], seed: tuple[int, int], stream: int = 0) -> np.ndarray:
    """A byte for each element, by blocks along rows."""
    rows, columns = shape
    blocks = -(-columns // BLOCK)
    drawn = [
        [byte for c in range(blocks) for byte in random_bytes(seed, row * blocks + c, stream)]
        for row in range(rows)
    ]
    return np.array(drawn, np.int64).reshape(rows, blocks * BLOCK)[:, :columns]


def random_columns(shape: tuple[int, int], seed: tuple[int, int]) -> np.ndarray:
    """A byte for each element of whole blocks of rows, by blocks down columns."""
    rows, columns = shape
    drawn = np.zeros((rows, columns), np.int64)
    for s in range(rows // BLOCK):
        for k in range(columns):
            drawn[s * BLOCK : (s + 1) * BLOCK, k] = random_bytes(seed, s * columns + k, 1)
    return drawn


def random_tiles(shape: tuple[int, int], seed: tuple[int, int]) -> np.ndarray:
    """A byte for each element of whole blocks of rows, by rows of tiles."""
    rows, columns = shape
    tiles = -(-columns // BLOCK)
    drawn = np.zeros((rows, tiles * BLOCK), np.int64)
    for row in range(rows):
        s, i = divmod(row, BLOCK)
        for c in range(tiles):
            block = (s * tiles + c) * BLOCK + i
            drawn[row, c * BLOCK : (c + 1) * BLOCK] = random_bytes(seed, block, 2)
    return drawn[:, :columns]
