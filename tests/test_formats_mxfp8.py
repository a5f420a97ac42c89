"""MXFP8 tensors against the definition: rows, columns, tiles, and groups."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import definitions
from backstash.errors import RecipeError
from backstash.formats import MXFP8, Usage
from backstash.tensors import GroupedTensor
from definitions_block import mx_tiles, scale_matrix
from quantizer_cases import (
    assert_same,
    by_counts,
    by_dtype,
    by_shape,
    by_special,
    grouped_values,
    matrix,
    special_matrix,
    values,
)


def check(x):
    """Both directions of one tensor: codes, scales, values."""
    q, name = MXFP8.quantize(x, Usage.BOTH), str(x.dtype)[6:]
    assert (q.shape, q.dtype) == (x.shape, x.dtype)
    codes, exponents = definitions.mx_rows(matrix(x))
    assert_same(q.row_codes, codes)
    assert_same(q.row_scales, exponents)
    wanted = definitions.rounded(definitions.mx_row_values(codes, exponents), name)
    assert_same(q.dequantize(Usage.ROWWISE), wanted)
    codes, exponents = definitions.mx_columns(matrix(x))
    assert_same(q.column_codes, codes)
    assert_same(q.column_scales, exponents)
    wanted = definitions.rounded(definitions.mx_column_values(codes, exponents), name)
    assert_same(q.dequantize(Usage.COLUMNWISE), wanted)


@by_dtype
@by_shape
def test_rows_and_columns_are_the_definition(shape, dtype):
    check(values(shape, dtype))


@by_dtype
@by_special
def test_special_values_are_the_definition(special, dtype):
    check(special_matrix(special).to(dtype))


@pytest.mark.parametrize("slice_of", [lambda x: x.T, lambda x: x[::2, 1::3]], ids=["T", "strided"])
def test_strided_values_are_the_definition(slice_of):
    check(slice_of(values((65, 99))))


def test_leading_dimensions_are_rows_like_any_others():
    x = values((5, 11, 40))
    whole, flat = MXFP8.quantize(x, Usage.BOTH), MXFP8.quantize(x.flatten(0, 1), Usage.BOTH)
    for name, buffer in flat.buffers.items():
        assert torch.equal(whole.buffers[name], buffer)


@by_dtype
def test_a_round_trip_keeps_the_tolerance_of_the_format(dtype):
    x = torch.randn(65, 33).to(dtype)
    for usage in Usage:
        got = MXFP8.quantize(x, usage).dequantize()
        torch.testing.assert_close(got, x, rtol=MXFP8.rtol, atol=MXFP8.atol)


@by_dtype
@by_counts
def test_columns_start_anew_in_every_group_and_the_tail_is_not_read(counts, dtype):
    x, ends = grouped_values(counts, 40)
    check_groups(x.to(dtype), counts, ends)


def check_groups(x, counts, ends):
    rows, name = sum(counts), str(x.dtype)[6:]
    grouped = MXFP8.quantize(GroupedTensor(x, ends), Usage.BOTH)
    q = grouped.data
    codes, exponents = definitions.mx_group_columns(matrix(x), counts)
    assert_same(q.column_codes[:rows], codes[:rows])
    assert_same(q.column_scales, exponents)
    wanted = definitions.mx_group_column_values(codes, exponents, counts)
    assert_same(q.dequantize(Usage.COLUMNWISE), definitions.rounded(wanted, name))
    codes, exponents = definitions.mx_rows(matrix(x)[:rows])
    assert_same(q.row_codes[:rows], codes)
    assert_same(q.row_scales[:rows], exponents)
    wanted = definitions.rounded(definitions.mx_row_values(codes, exponents), name)
    assert_same(grouped.dequantize().data[:rows], wanted)


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(0, 70), min_size=1, max_size=6),
    columns=st.integers(1, 40),
    tail=st.integers(0, 40),
)
def test_any_groups_are_the_definition(counts, columns, tail):
    x, ends = grouped_values(counts, columns, tail)
    check_groups(x, counts, ends)


@by_counts
def test_the_bytes_of_a_group_do_not_depend_on_the_tail(counts):
    x, ends = grouped_values(counts, 40)
    other = x.clone()
    other[sum(counts) :] = 1e30
    one, two = (MXFP8.quantize(GroupedTensor(x, ends), Usage.BOTH).data for x in (x, other))
    for name, buffer in one.buffers.items():
        rows = MXFP8.valid_rows(name, ends, len(x))
        assert rows is not None
        assert torch.equal(buffer[: int(rows)], two.buffers[name][: int(rows)])


@by_counts
def test_unused_scales_are_zero(counts):
    x, ends = grouped_values(counts, 40)
    q = MXFP8.quantize(GroupedTensor(x, ends), Usage.COLUMNWISE).data
    used = sum(-(-count // 32) for count in counts)
    rows = MXFP8.valid_rows("column_scales", ends, len(x))
    assert rows is not None
    assert rows.tolist() == [used]
    assert not q.column_scales[used:].any()


# --- tiles -------------------------------------------------------------------------------------

TILES = dataclasses.replace(MXFP8, two_d=True)


def check_tiles(x, counts=None):
    """One set of codes of a tensor, or of one in groups."""
    q = TILES.quantize(x if counts is None else GroupedTensor.from_counts(x, counts), Usage.BOTH)
    q, rows = (q, len(matrix(x))) if counts is None else (q.data, sum(counts))
    codes, exponents, wanted = mx_tiles(matrix(x)[:rows], counts)
    assert_same(q.codes[:rows], codes)
    assert_same(q.scales, scale_matrix(exponents, tuple(q.scales.shape), np.uint8))
    for usage in (Usage.ROWWISE, Usage.COLUMNWISE):
        got = q.dequantize(usage).flatten(0, -2)
        assert_same(got[:rows], definitions.rounded(wanted, str(x.dtype)[6:]))
        assert not got[rows:].any()


@by_shape
def test_tiles_are_the_definition(shape):
    check_tiles(values(shape))


@by_dtype
def test_tiles_of_every_dtype_are_the_definition(dtype):
    check_tiles(values((33, 65), dtype))


@by_special
def test_tiles_of_special_values_are_the_definition(special):
    check_tiles(special_matrix(special))


@by_counts
def test_tiles_start_anew_in_every_group(counts):
    check_tiles(grouped_values(counts, 40)[0], counts)


def test_the_transpose_has_the_same_tiles():
    x = values((70, 34))
    q, transposed = TILES.quantize(x), TILES.quantize(x.T)
    assert torch.equal(q.codes.T, transposed.codes)
    assert torch.equal(q.scales.T, transposed.scales)
    assert q.nbytes == TILES.saved_bytes(70, 34, x.dtype, Usage.BOTH) == 70 * 34 + 3 * 2


def test_a_switch_is_on_or_off():
    with pytest.raises(RecipeError, match="two_d must be True or False, got 1"):
        dataclasses.replace(MXFP8, two_d=1)
