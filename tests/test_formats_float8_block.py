"""Float8 in blocks of 128 against the definition: rows, columns, tiles, and groups."""

import dataclasses

import numpy as np
import pytest
import torch

import definitions
from backstash.errors import RecipeError
from backstash.formats import FLOAT8_BLOCK, Code, Usage
from backstash.tensors import GroupedTensor
from definitions_block import float8, scale_matrix
from format_cases import valid
from quantizer_cases import (
    assert_same,
    by_code,
    by_counts,
    by_dtype,
    by_shape,
    by_special,
    grouped_values,
    matrix,
    special_matrix,
    values,
)

TILES = dataclasses.replace(FLOAT8_BLOCK, two_d=True)
#: Usage, shape of a block, names of the buffers.
LINES = [
    (Usage.ROWWISE, (1, 128), "row_codes", "row_scale_inv"),
    (Usage.COLUMNWISE, (128, 1), "column_codes", "column_scale_inv"),
]
SQUARES = [(usage, (128, 128), "codes", "scale_inv") for usage in (Usage.ROWWISE, Usage.COLUMNWISE)]


def check(x, counts=None, **options):
    """Codes, scales and values of both directions, lines and tiles."""
    for kind in (False, True):
        format = dataclasses.replace(FLOAT8_BLOCK, two_d=kind, **options)
        given = x if counts is None else GroupedTensor.from_counts(x, counts)
        q = format.quantize(given, Usage.BOTH)
        check_buffers(q if counts is None else q.data, x, counts, SQUARES if kind else LINES)


def check_buffers(q, x, counts, layouts):
    format, name = q.format, str(x.dtype)[6:]
    x_MK = matrix(x)
    valid = slice(0, len(x_MK) if counts is None else sum(counts))
    options = {
        "power_of_two": format.power_of_two,
        "epsilon": format.epsilon,
        "infinite": min(torch.finfo(x.dtype).max, definitions.FLOAT32_MAX),
    }
    for usage, block, codes_name, scales_name in layouts:
        restarts = counts if block[0] > 1 else None
        codes, scales, wanted = float8(x_MK[valid], block, format.code.value, restarts, **options)
        assert_same(q.buffers[codes_name][valid], codes)
        found = q.buffers[scales_name]
        found = found[valid] if block[0] == 1 else found
        assert_same(found, scale_matrix(scales, tuple(found.shape), np.float32))
        got = q.dequantize(usage).flatten(0, -2)
        assert_same(got[valid], definitions.rounded(wanted, name))
        if block[0] > 1:
            assert not got[valid.stop :].any()


@by_shape
def test_lines_and_tiles_are_the_definition(shape):
    check(values(shape))


@by_dtype
def test_every_dtype_is_the_definition(dtype):
    check(values((130, 140), dtype))


@by_dtype
@by_special
def test_special_values_are_the_definition(special, dtype):
    check(special_matrix(special, (130, 132)).to(dtype))


@by_code
@pytest.mark.parametrize("power_of_two", [False, True], ids=["exact", "power-of-two"])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3], ids=["no-epsilon", "epsilon"])
def test_options_are_the_definition(power_of_two, epsilon, code):
    x = values((130, 140))
    x[3], x[:, 5] = 0.0, 1e-30
    check(x, power_of_two=power_of_two, epsilon=epsilon, code=Code(code))


@pytest.mark.parametrize(
    "counts", [[128, 128], [0, 130, 5], [3, 0, 0, 300], [1], [127, 129]], ids=str
)
def test_blocks_start_anew_in_every_group(counts):
    check(grouped_values(counts, 130)[0], counts)


@by_counts
def test_small_groups_are_the_definition(counts):
    check(grouped_values(counts, 9)[0], counts)


def test_one_set_of_tiles_serves_both_usages():
    x = values((130, 65))
    q = TILES.quantize(x, Usage.BOTH)
    assert TILES.serves_both
    assert not FLOAT8_BLOCK.serves_both
    assert torch.equal(q.dequantize(Usage.ROWWISE), q.dequantize(Usage.COLUMNWISE))
    assert q.nbytes == TILES.saved_bytes(130, 65, x.dtype) == 130 * 65 + 4 * 2


def test_bytes_of_an_element_are_those_published():
    rows, columns = 1024, 512
    elements = rows * columns
    for usage in (Usage.ROWWISE, Usage.COLUMNWISE):
        saved = FLOAT8_BLOCK.saved_bytes(rows, columns, torch.bfloat16, usage)
        assert saved == elements + elements * 4 // 128
    assert TILES.saved_bytes(rows, columns, torch.bfloat16, Usage.BOTH) == elements + 8 * 4 * 4


def test_valid_rows_are_those_of_the_groups():
    ends = [3, 3, 200]
    for buffer in ("row_codes", "row_scale_inv", "column_codes", "codes"):
        assert valid(FLOAT8_BLOCK, buffer, ends, 256) == 200
    for buffer in ("column_scale_inv", "scale_inv"):
        assert valid(FLOAT8_BLOCK, buffer, ends, 256) == 3


@by_dtype
def test_a_round_trip_keeps_the_tolerance(dtype):
    x = torch.randn(130, 140).to(dtype)
    for format in (FLOAT8_BLOCK, TILES, dataclasses.replace(FLOAT8_BLOCK, code=Code.E5M2)):
        for usage in (Usage.ROWWISE, Usage.COLUMNWISE):
            got = format.quantize(x, usage).dequantize()
            torch.testing.assert_close(got, x, rtol=format.rtol, atol=format.atol)


@pytest.mark.parametrize("option", ["two_d", "power_of_two"])
def test_a_switch_is_on_or_off(option):
    with pytest.raises(RecipeError, match=f"{option} must be True or False, got 2"):
        dataclasses.replace(FLOAT8_BLOCK, **{option: 2})
