"""What a format makes of a matrix depends on its values alone: not on size, strides or dimensions.

A large matrix is compared with the definition in full where that is quick, and else on some of its
rows and columns, which the definition quantizes on their own with the scales of the whole.
"""

import dataclasses

import numpy as np
import pytest
import torch

import definitions
import definitions_nvfp4 as nvfp4
from backstash.formats import FLOAT8_BLOCK, FLOAT8_CURRENT, FLOAT8_DELAYED, NVFP4, Code, Usage
from definitions_block import WHOLE, float8, scale_matrix
from format_cases import assert_identical, by_format, by_usage
from quantizer_cases import NAN, assert_same, by_code, matrix, values
from test_formats_float8 import assert_is, define_current, define_scaled
from test_formats_float8_block import SQUARES, check_buffers
from test_formats_float8_rowwise import check as check_rowwise
from test_formats_mxfp8 import check as check_mx
from test_formats_mxfp8 import check_tiles as check_mx_tiles
from test_formats_nvfp4 import check_tiles as check_nvfp4_tiles

LARGE = (2048, 2000)
# The first, the last, and some in between; no block is hit twice.
SOME_ROWS = [*range(0, 2048, 139), 2047]
SOME_COLUMNS = [*range(0, 2000, 133), 1999]


@pytest.fixture(scope="module")
def large():
    torch.manual_seed(6)
    x = values(LARGE, torch.bfloat16)
    x[3], x[:, 5], x[700, 700] = 0.0, 0.0, NAN
    return x


# --- large -------------------------------------------------------------------------------------


@by_code
def test_a_large_tensor_with_one_scale_is_the_definition(large, code):
    current = dataclasses.replace(FLOAT8_CURRENT, code=Code(code))
    assert_is(current.quantize(large), define_current(matrix(large), code))
    delayed = dataclasses.replace(FLOAT8_DELAYED, code=Code(code))
    scale = float(np.float32(0.37))
    got = delayed.quantize(large, scale=torch.tensor([scale]))
    assert_is(got, define_scaled(matrix(large), scale, code))


def test_large_rows_and_columns_with_a_scale_each_are_the_definition(large):
    check_rowwise(large)


def test_large_blocks_of_32_are_the_definition(large):
    check_mx(large)
    check_mx_tiles(large)


def test_large_blocks_of_128_are_the_definition(large):
    tiles = dataclasses.replace(FLOAT8_BLOCK, two_d=True)
    check_buffers(tiles.quantize(large, Usage.BOTH), large, None, SQUARES)
    q = FLOAT8_BLOCK.quantize(large, Usage.BOTH)
    options = {"power_of_two": True, "infinite": definitions.FLOAT32_MAX}
    x = matrix(large)
    codes, scales, wanted = float8(x[SOME_ROWS], (1, 128), "e4m3", **options)
    assert_same(q.row_codes[SOME_ROWS], codes)
    assert_same(q.row_scale_inv[SOME_ROWS], scale_matrix(scales, (len(codes), 16), np.float32))
    assert_same(q.dequantize(Usage.ROWWISE)[SOME_ROWS], definitions.rounded(wanted, "bfloat16"))
    codes, scales, wanted = float8(x[:, SOME_COLUMNS], (128, 1), "e4m3", **options)
    assert_same(q.column_codes[:, SOME_COLUMNS], codes)
    found = q.column_scale_inv[:, SOME_COLUMNS]
    assert_same(found, scale_matrix(scales, tuple(found.shape), np.float32))
    got = q.dequantize(Usage.COLUMNWISE)[:, SOME_COLUMNS]
    assert_same(got, definitions.rounded(wanted, "bfloat16"))


def test_large_tiles_of_16_are_the_definition(large):
    check_nvfp4_tiles(large[:, :400])


@pytest.mark.parametrize("row_scaled", [False, True], ids=["one-amax", "row-scaled"])
@pytest.mark.parametrize("hadamard", [False, True], ids=["plain", "hadamard"])
def test_large_blocks_of_16_are_the_definition(large, row_scaled, hadamard):
    format = dataclasses.replace(NVFP4, row_scaled=row_scaled, hadamard=hadamard)
    x, q = matrix(large), format.quantize(large, Usage.BOTH)
    amax = nvfp4.spread_amax(x, (1 if row_scaled else WHOLE, WHOLE), None)[SOME_ROWS]
    wanted = nvfp4.quantize(x[SOME_ROWS], (1, 16), amax)
    assert_same(q.row_codes[SOME_ROWS], nvfp4.pack(wanted.nibbles))
    scales = scale_matrix(wanted.scales, (len(amax), 125), np.uint8)
    assert_same(q.row_scales[SOME_ROWS], scales)
    got = q.dequantize(Usage.ROWWISE)[SOME_ROWS]
    assert_same(got, definitions.rounded(wanted.values, "bfloat16"))

    y = nvfp4.rotate(x) if hadamard else x
    amax = nvfp4.spread_amax(y, (WHOLE, 1 if row_scaled else WHOLE), None)[:, SOME_COLUMNS]
    wanted = nvfp4.quantize(y[:, SOME_COLUMNS], (16, 1), amax)
    codes = q.column_codes.flatten().view(2000, 1024)[SOME_COLUMNS]
    assert_same(codes, nvfp4.pack(wanted.nibbles.T))
    found = q.column_scales[:, SOME_COLUMNS]
    assert_same(found, scale_matrix(wanted.scales, tuple(found.shape), np.uint8))
    back = nvfp4.rotate_back(wanted.values) if hadamard else wanted.values
    got = q.dequantize(Usage.COLUMNWISE)[:, SOME_COLUMNS]
    assert_same(got, definitions.rounded(back, "bfloat16"))


# --- strides and dimensions --------------------------------------------------------------------

LAYOUTS = {
    "transposed": lambda: values((65, 50)).T,
    "strided": lambda: values((100, 195))[::2, 1::3],
    "offset": lambda: values((51, 70))[1:, 5:],
    "expanded": lambda: values((50, 1)).expand(50, 65),
    "permuted": lambda: values((65, 5, 10)).permute(1, 2, 0),
    "one-row-again-and-again": lambda: values((1, 65)).expand(50, 65),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS.keys())
@by_format
@by_usage
def test_strides_change_no_byte(format, usage, make):
    x = make()
    assert_identical(format.quantize(x, usage), format.quantize(x.contiguous(), usage))


@by_format
@by_usage
@pytest.mark.parametrize("shape", [(5, 11, 40), (2, 3, 4, 17), (40,), (3, 0, 40), (0, 2, 17)])
def test_leading_dimensions_are_rows_like_any_others(format, usage, shape):
    x = values(shape)
    q = format.quantize(x, usage)
    flat = format.quantize(x.reshape(-1, shape[-1]) if x.numel() else x.flatten(0, -2), usage)
    assert q.shape == shape
    assert q.buffers.keys() == flat.buffers.keys()
    for name, buffer in flat.buffers.items():
        assert_same(q.buffers[name], buffer.numpy())
    for side in usage:
        assert torch.equal(q.dequantize(side), flat.dequantize(side).reshape(shape))


@by_format
@by_usage
@pytest.mark.parametrize("columns", [1, 15, 17, 31, 33, 127, 129])
def test_columns_that_are_no_whole_blocks_are_those_of_padding_with_zeros(format, usage, columns):
    """Zeros change no amax, so the codes of what is there are those of the padded matrix."""
    x = values((37, columns))
    padded = torch.nn.functional.pad(x, (0, -columns % 128))
    got, wanted = format.quantize(x, usage), format.quantize(padded, usage)
    for side in usage:
        assert torch.equal(got.dequantize(side), wanted.dequantize(side)[:, :columns])
