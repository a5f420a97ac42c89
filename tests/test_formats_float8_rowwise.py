"""Float8 with a scale a row or column against the definition, bit for bit."""

import dataclasses

import numpy as np
import pytest
import torch

import definitions
from backstash.errors import RecipeError
from backstash.formats import FLOAT8_ROWWISE, Code, Usage
from backstash.tensors import GroupedTensor
from definitions_block import WHOLE, float8, scale_matrix
from format_cases import valid
from quantizer_cases import (
    NAN,
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


def check(x, counts=None, **options):
    """Codes, scales and values of both directions of a tensor, or of one in groups."""
    format = dataclasses.replace(FLOAT8_ROWWISE, **options)
    given = x if counts is None else GroupedTensor.from_counts(x, counts)
    q = format.quantize(given, Usage.BOTH)
    q = q if counts is None else q.data
    options["code"], x_MK = format.code.value, matrix(x)
    valid = slice(0, len(x_MK) if counts is None else sum(counts))

    codes, scales, wanted = float8(x_MK[valid], (1, WHOLE), **options)
    assert_same(q.row_codes[valid], codes)
    if x_MK.shape[1]:
        assert_same(q.row_scale_inv[valid], scale_matrix(scales, (len(codes), 1), np.float32))
    got = q.dequantize(Usage.ROWWISE).flatten(0, -2)[valid]
    assert_same(got, definitions.rounded(wanted, str(x.dtype)[6:]))

    for group, rows in enumerate(groups_of(counts or [len(x_MK)])):
        codes, scales, wanted = float8(x_MK[rows], (WHOLE, 1), **options)
        assert_same(q.column_codes[rows], codes)
        if len(codes):
            scales = scale_matrix(scales, (1, x_MK.shape[1]), np.float32)
            assert_same(q.column_scale_inv[group : group + 1], scales)
        got = q.dequantize(Usage.COLUMNWISE).flatten(0, -2)[rows]
        assert_same(got, definitions.rounded(wanted, str(x.dtype)[6:]))
    return q


def groups_of(counts):
    ends = np.cumsum(counts)
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]


@by_code
@by_dtype
@by_shape
def test_rows_and_columns_are_the_definition(shape, dtype, code):
    q = check(values(shape, dtype), code=Code(code))
    assert (q.shape, q.dtype) == (shape, dtype)


@by_code
@by_dtype
@by_special
def test_special_values_are_the_definition(special, dtype, code):
    check(special_matrix(special).to(dtype), code=Code(code))


@pytest.mark.parametrize("power_of_two", [False, True], ids=["exact", "power-of-two"])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3], ids=["no-epsilon", "epsilon"])
def test_options_are_the_definition(power_of_two, epsilon):
    x = values((33, 65))
    x[3], x[:, 5] = 0.0, 1e-30
    check(x, power_of_two=power_of_two, epsilon=epsilon)


@by_counts
def test_columns_have_a_scale_in_every_group_and_the_tail_is_zero(counts):
    x, _ = grouped_values(counts, 33)
    q = check(x, counts)
    assert not q.dequantize(Usage.COLUMNWISE)[sum(counts) :].any()


@by_counts
def test_what_is_in_the_tail_changes_nothing(counts):
    x, ends = grouped_values(counts, 33)
    q = FLOAT8_ROWWISE.quantize(GroupedTensor(x, ends), Usage.BOTH).data
    other = FLOAT8_ROWWISE.quantize(GroupedTensor(x.nan_to_num(7.0), ends), Usage.BOTH).data
    rows = sum(counts)
    assert torch.equal(q.column_scale_inv, other.column_scale_inv)
    assert torch.equal(q.column_codes[:rows], other.column_codes[:rows])
    assert torch.equal(q.row_codes[:rows], other.row_codes[:rows])
    assert torch.equal(q.row_scale_inv[:rows], other.row_scale_inv[:rows])


def test_a_huge_row_takes_no_precision_from_the_others():
    x = torch.rand(4, 32) + 1
    x[2] *= 1e30
    torch.testing.assert_close(
        FLOAT8_ROWWISE.quantize(x).dequantize(), x, rtol=FLOAT8_ROWWISE.rtol, atol=0
    )


def test_bytes_are_one_an_element_and_a_scale_a_row():
    assert FLOAT8_ROWWISE.saved_bytes(64, 32, torch.bfloat16) == 64 * 32 + 64 * 4
    columns = FLOAT8_ROWWISE.saved_bytes(64, 32, torch.bfloat16, Usage.COLUMNWISE, groups=3)
    assert columns == 64 * 32 + 3 * 32 * 4


def test_valid_rows_are_those_of_the_groups():
    ends = [3, 3, 40]
    for buffer in ("row_codes", "row_scale_inv", "column_codes"):
        assert valid(FLOAT8_ROWWISE, buffer, ends, 64) == 40
    assert valid(FLOAT8_ROWWISE, "column_scale_inv", ends, 64) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"code": "e4m3"}, "must be Code"),
        ({"epsilon": NAN}, "finite"),
        ({"power_of_two": 1}, "power_of_two must be True or False, got 1"),
    ],
    ids=["code", "epsilon", "power_of_two"],
)
def test_an_option_that_means_nothing_is_refused(options, message):
    with pytest.raises(RecipeError, match=message):
        dataclasses.replace(FLOAT8_ROWWISE, **options)
