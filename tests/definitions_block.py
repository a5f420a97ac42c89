"""Float8 and MXFP8 in blocks of any shape by definition, without the library.

A matrix is cut into rectangles: rows are cut anew in every group, columns at multiples of the
block's width, and a rectangle at an edge is as large as what is there.  Each is quantized on
its own with the scalar arithmetic of ``definitions``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

import definitions

WHOLE = 1 << 60  # a block that is as long as its group or as its row


@dataclasses.dataclass(frozen=True)
class Rectangle:
    """A block: where it is, and its place in the matrix of scales."""

    rows: slice
    columns: slice
    place: tuple[int, int]


def cuts(counts: list[int], block: int) -> list[slice]:
    """Blocks of up to ``block`` rows, anew in every group."""
    found, start = [], 0
    for count in counts:
        ends = range(start, start + count, block) if block < WHOLE else [start] * (count > 0)
        found += [slice(first, min(first + block, start + count)) for first in ends]
        start += count
    return found


def rectangles(
    shape: tuple[int, int], block: tuple[int, int], counts: list[int] | None
) -> Iterator[Rectangle]:
    """All blocks of a matrix."""
    for i, rows in enumerate(cuts(counts or [shape[0]], block[0])):
        for j, columns in enumerate(cuts([shape[1]], block[1])):
            yield Rectangle(rows, columns, (i, j))


def float8(
    x: np.ndarray,
    block: tuple[int, int],
    code: str,
    counts: list[int] | None = None,
    *,
    power_of_two: bool = False,
    epsilon: float = 0.0,
    infinite: float = definitions.FLOAT32_MAX,
) -> tuple[np.ndarray, dict[tuple[int, int], float], np.ndarray]:
    """Codes, the inverse scale of each block by its place, and float32 values."""
    codes, values = np.zeros(x.shape, np.uint8), np.zeros(x.shape, np.float32)
    scales = {}
    for at in rectangles((x.shape[0], x.shape[1]), block, counts):
        part = x[at.rows, at.columns]
        scale = definitions.scale_from_amax(
            definitions.amax(part), definitions.LARGEST[code], epsilon=epsilon, infinite=infinite
        )
        scale = definitions.power_of_two_below(scale) if power_of_two else scale
        scales[at.place] = definitions.inverse(scale)
        codes[at.rows, at.columns] = definitions.float8(part, scale, code)
        values[at.rows, at.columns] = definitions.float8_values(
            codes[at.rows, at.columns], scales[at.place], code
        )
    return codes, scales, values


def mx_tiles(
    x: np.ndarray, counts: list[int] | None = None
) -> tuple[np.ndarray, dict[tuple[int, int], int], np.ndarray]:
    """Codes, the E8M0 byte of each tile of 32 by 32 by its place, and float32 values."""
    x = definitions.float32(x)
    codes, values = np.zeros(x.shape, np.uint8), np.zeros(x.shape, np.float32)
    exponents = {}
    for at in rectangles((x.shape[0], x.shape[1]), (32, 32), counts):
        part = x[at.rows, at.columns]
        amax = np.float32(definitions.amax(part))
        exponent = definitions.mx_exponent(np.array(amax))
        power = definitions.mx_power(exponent)
        exponents[at.place] = int(exponent)
        codes[at.rows, at.columns] = definitions.encode(
            definitions.product(part, 1 / power), "e4m3"
        )
        values[at.rows, at.columns] = definitions.product(
            definitions.decode(codes[at.rows, at.columns], "e4m3"), power
        )
    return codes, exponents, values


def scale_matrix(
    scales: Mapping[tuple[int, int], float], shape: tuple[int, int], dtype: type
) -> np.ndarray:
    """The scales as they are kept: zero where no group has a block."""
    matrix = np.zeros(shape, dtype)
    for place, scale in scales.items():
        matrix[place] = scale
    return matrix
