"""Test vectors for other implementations: ``python tests/write_vectors.py`` writes them.

The numbers come from ``definitions.py`` alone.  Floats are written as the eight hexadecimal
digits of their float32 bits (so NaN, infinities and the sign of zero are kept), codes and
E8M0 scales as two digits a byte; matrices are row by row.  ``vectors/mxfp8.json`` has matrices
with both directions; ``vectors/float8.json`` has casts, current scaling, and the history of
delayed scaling step by step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import definitions

FOLDER = Path(__file__).parent / "vectors"
SEED = 20  # of RandomState, whose stream numpy has promised never to change
Json = dict[str, Any]
# The last columns of the first row of every matrix.
CORNERS = [0.0, -0.0, 1.0, -1.0, 448.0, 2.0**-9, 3.0e38, -1e-40, np.inf, np.nan]


def float_text(values: Any) -> str:
    """Float32 values as hexadecimal bits; every NaN as ``7fc00000``."""
    values = np.asarray(values, np.float32).reshape(-1)
    bits = np.where(np.isnan(values), np.uint32(0x7FC00000), values.view(np.uint32))
    return "".join(f"{int(each):08x}" for each in bits)


def byte_text(codes: np.ndarray) -> str:
    """Bytes as hexadecimal."""
    return np.ascontiguousarray(codes).tobytes().hex()


def matrix(generator: np.random.RandomState, rows: int, columns: int, corners: int) -> np.ndarray:
    """Random float32 of many magnitudes, ``corners`` of the corner cases in the first row."""
    x = generator.standard_normal((rows, columns)) * 2.0 ** generator.randint(-30, 20, columns)
    x[0, columns - corners :] = CORNERS[:corners]
    return x.astype(np.float32)


def mx_case(x: np.ndarray, counts: list[int] | None) -> Json:
    """One matrix, in groups of rows where ``counts`` are given."""
    row_codes, row_scales = definitions.mx_rows(x)
    if counts is None:
        column_codes, column_scales = definitions.mx_columns(x)
        values = definitions.mx_column_values(column_codes, column_scales)
    else:
        column_codes, column_scales = definitions.mx_group_columns(x, counts)
        values = definitions.mx_group_column_values(column_codes, column_scales, counts)
    return {
        "shape": list(x.shape),
        "counts": counts,
        "values": float_text(x),
        "row_codes": byte_text(row_codes),
        "row_scales": byte_text(row_scales),
        "row_values": float_text(definitions.mx_row_values(row_codes, row_scales)),
        "column_codes": byte_text(column_codes),
        "column_scales": byte_text(column_scales),
        "column_values": float_text(values),
    }


def mxfp8() -> Json:
    """Matrices with blocks that are full, ragged, and anew in every group."""
    generator = np.random.RandomState(SEED)
    return {
        "format": "MXFP8: blocks of 32, E4M3 codes, E8M0 scales",
        "cases": [
            mx_case(matrix(generator, 1, 1, 0), None),
            mx_case(matrix(generator, 3, 45, 10), None),
            mx_case(matrix(generator, 32, 32, 8), None),
            mx_case(matrix(generator, 33, 5, 5), None),
            mx_case(matrix(generator, 35, 6, 6), [31, 0, 4]),
            mx_case(matrix(generator, 40, 3, 0), [0, 33, 1, 6]),
        ],
    }


def cast_case(code: str) -> Json:
    """Every boundary between two codes and its float32 neighbours, with both signs."""
    middle = definitions.midpoints(code).astype(np.float32)
    beside = [np.nextafter(middle, np.float32(end)) for end in (0, np.inf)]
    x = np.concatenate([beside[0], middle, beside[1], np.asarray(CORNERS, np.float32)])
    x = np.concatenate([x, -x])
    return {"values": float_text(x), "codes": byte_text(definitions.encode(x, code))}


def current_case(x: np.ndarray, code: str, *, power_of_two: bool) -> Json:
    """One tensor with the scale of its own largest magnitude."""
    scale = definitions.scale_from_amax(definitions.amax(x), definitions.LARGEST[code])
    scale = definitions.power_of_two_below(scale) if power_of_two else scale
    codes, scale_inv = definitions.float8(x, scale, code), definitions.inverse(scale)
    return {
        "code": code,
        "power_of_two": power_of_two,
        "shape": list(x.shape),
        "values": float_text(x),
        "scale": float_text(scale),
        "scale_inv": float_text(scale_inv),
        "codes": byte_text(codes),
        "dequantized": float_text(definitions.float8_values(codes, scale_inv, code)),
    }


def delayed_case(code: str, history: int, *, most_recent: bool) -> Json:
    """A history of ``history`` steps, from zeros and a scale of one, after each step."""
    amaxes = [3.0, 0.0, 100.0, 7.0, 5.0, np.inf, 2.0, 1.0, 0.5, 2.0**-149, 0.25, 0.1]
    slots, scale, steps = [0.0] * history, 1.0, []
    for amax in np.asarray(amaxes, np.float32).tolist():
        slots, scale = definitions.delayed_update(
            slots, scale, amax, definitions.LARGEST[code], most_recent=most_recent
        )
        steps.append(
            {"amax": float_text(amax), "history": float_text(slots), "scale": float_text(scale)}
        )
    return {"code": code, "history": history, "most_recent": most_recent, "steps": steps}


def float8() -> Json:
    """Casts, current scaling and delayed scaling."""
    generator = np.random.RandomState(SEED)
    return {
        "format": "Float8 with one float32 scale a tensor",
        "casts": {code: cast_case(code) for code in definitions.FIELDS},
        "current": [
            current_case(matrix(generator, 3, 12, corners), code, power_of_two=power_of_two)
            for code in definitions.FIELDS
            for power_of_two in (False, True)
            for corners in (0, 6, 10)
        ],
        "delayed": [
            delayed_case(code, history, most_recent=most_recent)
            for code in definitions.FIELDS
            for history in (1, 4)
            for most_recent in (False, True)
        ],
    }


FILES = {"mxfp8.json": mxfp8, "float8.json": float8}


def text(name: str) -> str:
    """What the file ``name`` should hold."""
    return json.dumps(FILES[name](), indent=1) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in FILES:
        (FOLDER / name).write_text(text(name))
        print(f"{FOLDER / name}: {(FOLDER / name).stat().st_size} bytes")
