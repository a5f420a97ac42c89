"""Float8 with a scale a row or column, at the places where rounding goes one way or the other."""

import numpy as np
import pytest
import torch

import definitions
from backstash import kernels
from quantizer_cases import assert_same, by_code, values

CODE_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def boundaries(code: str) -> torch.Tensor:
    """A column of the largest value, so that scales are one, beside every boundary."""
    middle = definitions.midpoints(code).astype(np.float32)
    points = np.concatenate(
        [np.nextafter(middle, np.float32(0)), middle, np.nextafter(middle, 1e9)]
    )
    points = points[np.abs(points) <= definitions.LARGEST[code]]
    x = np.stack([points, -points, np.full(len(points), definitions.LARGEST[code])], axis=1)
    return torch.from_numpy(x.astype(np.float32))


@by_code
def test_values_on_and_beside_every_rounding_boundary_get_the_nearest_even_code(code):
    x = boundaries(code)
    wanted = definitions.encode(x.numpy(), code)
    codes, scale_inv = kernels.quantize_float8_rows(x, CODE_DTYPES[code])
    assert scale_inv.unique().tolist() == [1.0]
    assert_same(codes, wanted)
    codes, scale_inv = kernels.quantize_float8_columns(x.T, CODE_DTYPES[code])
    assert scale_inv.unique().tolist() == [1.0]
    assert_same(codes, wanted.T)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_a_row_and_the_same_column_get_the_same_codes(power_of_two):
    x = values((33, 65))
    options = {"epsilon": 1e-3, "power_of_two": power_of_two}
    rows, row_scales = kernels.quantize_float8_rows(x, torch.float8_e4m3fn, **options)
    columns, column_scales = kernels.quantize_float8_columns(x.T, torch.float8_e4m3fn, **options)
    assert torch.equal(rows, columns.T)
    assert torch.equal(row_scales, column_scales.T)


def test_results_are_contiguous_from_any_strides():
    x, ends = values((65, 40)).T, torch.tensor([7, 40], dtype=torch.int32)
    for found, wanted in (
        (
            kernels.quantize_float8_rows(x, torch.float8_e4m3fn),
            kernels.quantize_float8_rows(x.contiguous(), torch.float8_e4m3fn),
        ),
        (
            kernels.quantize_float8_columns(x, torch.float8_e4m3fn, ends),
            kernels.quantize_float8_columns(x.contiguous(), torch.float8_e4m3fn, ends),
        ),
    ):
        assert all(part.is_contiguous() for part in found)
        assert all(map(torch.equal, found, wanted))
