"""Blocks of 128: rounding boundaries, scales at their corners, one block beside another."""

import numpy as np
import pytest
import torch

import definitions
from backstash import kernels
from definitions_block import float8, scale_matrix
from quantizer_cases import NAN, TINY, assert_same, by_code, matrix, values

CODE_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
DIRECTIONS = {
    "rows": kernels.quantize_block_rows,
    "columns": lambda x, code, **options: tuple(
        part.T for part in kernels.quantize_block_columns(x.T, code, **options)
    ),
    "tiles": kernels.quantize_block_tiles,
}
by_direction = pytest.mark.parametrize("quantize", DIRECTIONS.values(), ids=DIRECTIONS.keys())


@by_code
@by_direction
def test_values_on_and_beside_every_rounding_boundary_get_the_nearest_even_code(quantize, code):
    middle = definitions.midpoints(code).astype(np.float32)
    points = np.concatenate([np.nextafter(middle, np.float32(0)), middle])
    largest = definitions.LARGEST[code]
    blocks = np.full((2 * len(points), 128), largest, np.float32)
    # One block each, in tiles too: a value, its negative, and the largest, so the scale is one.
    blocks[::2, 5], blocks[::2, 6] = points, -points
    codes, scale_inv = quantize(torch.from_numpy(blocks), CODE_DTYPES[code])
    assert scale_inv.unique().tolist() == [1.0]
    assert_same(codes, definitions.encode(blocks, code))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("power_of_two", [False, True])
@by_direction
def test_a_scale_too_large_is_the_largest_of_the_inputs_dtype(quantize, power_of_two, dtype):
    smallest = (
        2.0**-24 if dtype is torch.float16 else TINY if dtype != torch.bfloat16 else 2.0**-133
    )
    x = torch.full((1, 3), smallest, dtype=dtype)
    infinite = min(torch.finfo(dtype).max, definitions.FLOAT32_MAX)
    codes, scale_inv = quantize(x, torch.float8_e4m3fn, power_of_two=power_of_two)
    options = {"power_of_two": power_of_two, "infinite": infinite}
    wanted, scales, _ = float8(matrix(x), (1, 128), "e4m3", **options)
    assert_same(codes, wanted)
    assert_same(scale_inv, scale_matrix(scales, (1, 1), np.float32))


@by_direction
def test_a_nan_stays_alone_and_a_huge_value_spoils_its_own_block_only(quantize):
    x = torch.full((256, 256), 3.0)
    x[5, 7], x[200, 200] = NAN, 3e38
    codes, scale_inv = quantize(x, torch.float8_e4m3fn)
    assert (codes == 0x7F).sum() == 1
    assert codes[5, 7] == 0x7F
    assert (scale_inv != scale_inv.flatten()[0]).sum() == 1


def test_the_transpose_has_the_same_tiles():
    x = values((300, 130))
    codes, scale_inv = kernels.quantize_block_tiles(x, torch.float8_e4m3fn)
    transposed = kernels.quantize_block_tiles(x.T, torch.float8_e4m3fn)
    assert torch.equal(codes.T, transposed[0])
    assert torch.equal(scale_inv.T, transposed[1])
    assert all(part.is_contiguous() for part in transposed)


def test_scales_of_blocks_that_no_group_uses_are_zero():
    ends = torch.tensor([1, 1, 130], dtype=torch.int32)
    for quantize in (kernels.quantize_block_columns, kernels.quantize_block_tiles):
        _, scale_inv = quantize(torch.ones(140, 4), torch.float8_e4m3fn, ends)
        assert scale_inv[:, 0].ne(0).tolist() == [True, True, True, False, False]
