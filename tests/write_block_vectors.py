"""Test vectors of the formats with blocks: ``python tests/write_block_vectors.py`` writes them.

As ``write_vectors.py`` does, from the definitions alone and with the same spelling of numbers.
Each case has the values, the groups if there are any, the options, and for each direction
codes, scales and dequantized values.  The transposed codes of NVFP4 are the bytes of all groups
one after another; scales are row by row, without those of blocks that no group uses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

import definitions_nvfp4 as nvfp4
from definitions_block import WHOLE, float8, mx_tiles
from write_vectors import FOLDER, SEED, Json, byte_text, float_text, matrix

SHAPES: list[tuple[int, int, int, list[int] | None]] = [
    (1, 1, 0, None),
    (3, 45, 10, None),
    (33, 18, 5, None),
    (20, 6, 0, [0, 17, 1, 2]),
]
PAIR = (11, 12)  # seed and offset of stochastic rounding


def in_order(scales: Mapping[tuple[int, int], float]) -> list[float]:
    """Scales row by row."""
    return [scales[place] for place in sorted(scales)]


def block_case(
    x: np.ndarray, block: tuple[int, int], counts: list[int] | None, options: Json
) -> Json:
    """One direction of float8 in blocks."""
    restarts = counts if block[0] > 1 else None
    codes, scales, values = float8(x, block, **({"code": "e4m3", "counts": restarts} | options))
    return {
        "codes": byte_text(codes),
        "scale_inv": float_text(in_order(scales)),
        "values": float_text(values),
    }


def described(x: np.ndarray, counts: list[int] | None, options: Json) -> Json:
    """What a case is about."""
    return {
        "shape": list(x.shape),
        "counts": counts,
        "options": options,
        "values": float_text(x),
    }


def matrices() -> list[tuple[np.ndarray, list[int] | None]]:
    """The same few matrices for every format."""
    generator = np.random.RandomState(SEED)
    return [(matrix(generator, m, k, corners), counts) for m, k, corners, counts in SHAPES]


def float8_rowwise() -> Json:
    """A scale a row, and a column of each group."""
    cases = []
    for x, counts in matrices():
        for options in ({"code": "e4m3"}, {"code": "e5m2", "power_of_two": True}):
            columns = block_case(x, (WHOLE, 1), counts, options)
            rows = block_case(x, (1, WHOLE), counts, options)
            cases.append({**described(x, counts, options), "rows": rows, "columns": columns})
    return {"format": "Float8 with a float32 scale a row or column", "cases": cases}


def float8_block() -> Json:
    """Lines of 128 in both directions, and tiles."""
    cases = []
    for x, counts in matrices():
        for power_of_two in (True, False):
            options = {"power_of_two": power_of_two}
            lines = {
                "rows": block_case(x, (1, 128), counts, options),
                "columns": block_case(x, (128, 1), counts, options),
                "tiles": block_case(x, (128, 128), counts, options),
            }
            cases.append({**described(x, counts, options), **lines})
    return {"format": "Float8 E4M3 in blocks of 128 with float32 scales", "cases": cases}


def mxfp8_tiles() -> Json:
    """MXFP8 in tiles of 32 by 32."""
    cases = []
    for x, counts in matrices():
        codes, exponents, values = mx_tiles(x, counts)
        tiles = {
            "codes": byte_text(codes),
            "scales": byte_text(np.array(in_order(exponents), np.uint8)),
            "values": float_text(values),
        }
        cases.append({**described(x, counts, {}), "tiles": tiles})
    return {"format": "MXFP8: tiles of 32 by 32, E4M3 codes, E8M0 scales", "cases": cases}


def nvfp4_part(found: nvfp4.Quantized, codes: np.ndarray, values: np.ndarray) -> Json:
    """One direction of NVFP4."""
    return {
        "codes": byte_text(codes),
        "scales": byte_text(np.array(in_order(found.scales), np.uint8)),
        "values": float_text(values),
    }


def nvfp4_rows(x: np.ndarray, counts: list[int] | None, options: Json) -> Json:
    """Blocks along rows."""
    amax = nvfp4.spread_amax(x, (1 if options.get("row_scaled") else WHOLE, WHOLE), counts)
    random = nvfp4.random_rows(shape_of(x), PAIR) if options.get("stochastic_rounding") else None
    over = bool(options.get("four_over_six"))
    found = nvfp4.quantize(x, (1, 16), amax, random=random, four_over_six=over)
    return nvfp4_part(found, nvfp4.pack(found.nibbles), found.values)


def nvfp4_columns(x: np.ndarray, counts: list[int] | None, options: Json) -> Json:
    """Blocks down columns, transposed group by group."""
    groups, mixed = counts or [len(x)], bool(options.get("hadamard"))
    padded, sizes = nvfp4.padded_groups(x, groups)
    padded = nvfp4.rotate(padded) if mixed else padded
    amax = nvfp4.spread_amax(padded, (WHOLE, 1 if options.get("row_scaled") else WHOLE), sizes)
    drawn = bool(options.get("stochastic_rounding"))
    random = nvfp4.random_columns(shape_of(padded), PAIR) if drawn else None
    over = bool(options.get("four_over_six"))
    found = nvfp4.quantize(padded, (16, 1), amax, sizes, random=random, four_over_six=over)
    kept = found.nibbles if mixed else nvfp4.unpadded(found.nibbles, groups, len(x))
    codes = nvfp4.pack_columns(kept, sizes if mixed else groups, 16 if mixed else 2)
    values = nvfp4.rotate_back(found.values) if mixed else found.values
    return nvfp4_part(found, codes, nvfp4.unpadded(values, groups, len(x)))


def nvfp4_tiles(x: np.ndarray, counts: list[int] | None, options: Json) -> Json:
    """Tiles of 16 by 16."""
    amax = nvfp4.spread_amax(x, (WHOLE, WHOLE), counts)
    over = bool(options.get("four_over_six"))
    found = nvfp4.quantize(x, (16, 16), amax, counts, four_over_six=over)
    return nvfp4_part(found, nvfp4.pack(found.nibbles), found.values)


def shape_of(x: np.ndarray) -> tuple[int, int]:
    """Rows and columns."""
    return x.shape[0], x.shape[1]


def nvfp4_vectors() -> Json:
    """Both directions and tiles, with each option."""
    cases = []
    for x, counts in matrices():
        for option in (None, "row_scaled", "four_over_six", "hadamard", "stochastic_rounding"):
            options = {} if option is None else {option: True}
            case = described(x, counts, options)
            case["rows"] = nvfp4_rows(x, counts, options)
            case["columns"] = nvfp4_columns(x, counts, options)
            if option in (None, "four_over_six"):
                case["tiles"] = nvfp4_tiles(x, counts, options)
            cases.append(case)
    return {
        "format": "NVFP4: blocks of 16, E2M1 codes, E4M3 scales, a float32 scale over all",
        "seed_and_offset": list(PAIR),
        "cases": cases,
    }


FILES: dict[str, Any] = {
    "float8_rowwise.json": float8_rowwise,
    "float8_block.json": float8_block,
    "mxfp8_tiles.json": mxfp8_tiles,
    "nvfp4.json": nvfp4_vectors,
}


def text(name: str) -> str:
    """What the file ``name`` should hold."""
    return json.dumps(FILES[name](), indent=1) + "\n"


if __name__ == "__main__":
    for name in FILES:
        (FOLDER / name).write_text(text(name))
