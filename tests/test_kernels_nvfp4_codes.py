"""The Triton twins of NVFP4 in Triton's interpreter, byte for byte those of the reference.

The twins round by adding powers of two, which the interpreter does as a GPU does.  It only
casts to bfloat16 wrongly, so what is rotated here are whole numbers that need no rounding.
"""

from __future__ import annotations

import pytest
import torch

from backstash.kernels.reference import hadamard, nvfp4
from backstash.kernels.reference.blocks import column_amax, row_amax
from backstash.kernels.reference.cast import amax, group_amax
from interpreter import interpreted, run_interpreted
from quantizer_cases import by_counts, by_special, grouped_values, special_matrix, values
from twin_cases import assert_twin_bytes

# Numpy, which interprets, warns of a division by zero or a sum with an infinity.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
R = hadamard.hadamard_matrix(torch.device("cpu"))
SEED = torch.tensor([2**62 + 5, -77])
OPTIONS = {
    "plain": {},
    "four-over-six": {"four_over_six": True},
    "random": {"seed": SEED},
}
by_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
by_direction = pytest.mark.parametrize("direction", ["rows", "columns", "tiles"])


@pytest.mark.slow
def test_the_interpreted_twins_pass_these_tests() -> None:
    run_interpreted(__file__)


def check(direction, x, of_all, ends=None, rotation=None, **options):
    """Codes, scales and values of the twin; of a grouped matrix those of rows in a group."""
    from backstash.kernels import nvfp4 as twin
    from backstash.kernels import nvfp4_columns, nvfp4_values

    along_rows = direction != "columns"
    twin = twin if along_rows else nvfp4_columns
    names = [f"{verb}_nvfp4_{direction}" for verb in ("quantize", "dequantize")]
    quantize, dequantize = (getattr(nvfp4, name) for name in names)
    twin_quantize, twin_dequantize = getattr(twin, names[0]), getattr(nvfp4_values, names[1])
    given = () if along_rows else (rotation,)
    codes, scales = quantize(x, of_all, ends, *given, **options)
    got_codes, got_scales = twin_quantize(x, of_all, ends, *given, **options)
    rows = None if ends is None or not along_rows else int(ends[-1])
    of_rows = rows if direction == "rows" else None
    assert_twin_bytes(got_codes[:rows], codes[:rows])
    assert_twin_bytes(got_scales[:of_rows], scales[:of_rows])
    read = (x.shape[1] if along_rows else len(x), torch.float32, ends, *given)
    got, wanted = (f(codes, scales, of_all, *read) for f in (twin_dequantize, dequantize))
    assert_twin_bytes(got[:rows], wanted[:rows])


@interpreted
@by_direction
@by_options
@pytest.mark.parametrize("shape", [(1, 1), (33, 35), (0, 64), (5, 0)], ids=str)
def test_a_matrix_is_the_references(shape, options, direction):
    x = values(shape)
    check(direction, x, amax(x), **options)


@interpreted
@by_direction
@by_special
def test_special_values_are_the_references(special, direction):
    # The interpreter keeps the sign of a NaN, which a GPU drops.
    x = special_matrix(special, (17, 35))
    x = torch.where(x.isnan(), torch.nan, x)
    check(direction, x, amax(x))
    check(direction, x, torch.tensor([1e-42]), four_over_six=True)


@interpreted
@by_direction
@by_options
@by_counts
def test_groups_are_the_references(counts, options, direction):
    x, ends = grouped_values(counts, 7)
    check(direction, x, group_amax(x, ends), ends, **options)


@interpreted
def test_magnitudes_of_rows_and_of_columns_are_the_references():
    x, ends = grouped_values([17, 0, 20], 7)
    check("rows", x, row_amax(x))
    check("columns", x, column_amax(x))
    check("columns", x, column_amax(x, ends), ends)


@interpreted
@by_options
@by_counts
def test_rotated_columns_are_the_references(counts, options):
    from backstash.kernels import hadamard as twin

    x, ends = grouped_values(counts, 5)
    x = torch.randint(-8, 9, x.shape).float()
    of_all = hadamard.rotated_column_amax(x, R, ends)
    assert_twin_bytes(twin.rotated_column_amax(x, R, ends), of_all)
    check("columns", x, of_all, ends, R, **options)
    check("columns", x, row_amax(of_all).flatten(), ends, R, **options)


@interpreted
@by_counts
def test_both_directions_from_one_launch_are_the_references(counts):
    from backstash.kernels import nvfp4_both as twin

    x, ends = grouped_values(counts, 19)
    of_all, rows = (group_amax(x, ends),) * 2, int(ends[-1])
    got, wanted = (f.quantize_nvfp4_both(x, of_all, ends, None, SEED) for f in (twin, nvfp4))
    for one, other in zip(got[0], wanted[0], strict=True):
        assert_twin_bytes(one[:rows], other[:rows])
    for one, other in zip(got[1], wanted[1], strict=True):
        assert_twin_bytes(one, other)
