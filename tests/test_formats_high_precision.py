"""The format that changes nothing: what goes in comes out, in memory of its own."""

import pytest
import torch

from backstash.formats import HIGH_PRECISION, Usage
from backstash.tensors import GroupedTensor
from quantizer_cases import (
    assert_same,
    by_dtype,
    by_shape,
    by_special,
    grouped_values,
    matrix,
    special_matrix,
    values,
)


@by_dtype
@by_shape
def test_a_round_trip_is_exact(shape, dtype):
    x = values(shape, dtype)
    for usage in Usage:
        assert_same(HIGH_PRECISION.quantize(x, usage).dequantize(), matrix(x))


@by_special
def test_special_values_come_back(special):
    x = special_matrix(special)
    assert_same(HIGH_PRECISION.quantize(x).dequantize(), matrix(x))


@pytest.mark.parametrize("slice_of", [lambda x: x, lambda x: x.T], ids=["contiguous", "T"])
def test_values_are_copied_in_and_out(slice_of):
    x = slice_of(torch.ones(4, 3))
    q = HIGH_PRECISION.quantize(x)
    x.zero_()
    q.dequantize().zero_()
    assert q.values.is_contiguous()
    assert torch.equal(q.dequantize(), torch.ones_like(x))


def test_rows_of_groups_are_kept_as_they_are():
    x, ends = grouped_values([3, 0, 31], 5)
    got = HIGH_PRECISION.quantize(GroupedTensor(x, ends)).dequantize()
    assert_same(got.data[:34], matrix(x)[:34])
