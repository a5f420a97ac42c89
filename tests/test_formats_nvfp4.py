"""NVFP4 against the definition: rows, columns, tiles, every option, and groups."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

import definitions
import definitions_nvfp4 as nvfp4
from backstash.errors import RecipeError
from backstash.formats import NVFP4, Usage
from backstash.tensors import GroupedTensor
from definitions_block import WHOLE, scale_matrix
from format_cases import valid
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

TILES = dataclasses.replace(NVFP4, two_d=True)
SEED = (1, 2)  # what the tests draw instead of a fresh one
OPTIONS = {
    "plain": {},
    "row-scaled": {"row_scaled": True},
    "four-over-six": {"four_over_six": True},
    "random": {"stochastic_rounding": True},
    "hadamard": {"hadamard": True},
    "hadamard-random": {"hadamard": True, "stochastic_rounding": True},
    "all-but-tiles": {
        "row_scaled": True,
        "four_over_six": True,
        "stochastic_rounding": True,
        "hadamard": True,
    },
}
by_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


def check(x, counts=None, **options):
    """Rows and columns of a tensor in one format; both usages from one call."""
    format = dataclasses.replace(NVFP4, **options)
    given = x if counts is None else GroupedTensor.from_counts(x, counts)
    q = format.quantize(given, Usage.BOTH)
    q = q if counts is None else q.data
    check_rows(q, matrix(x), counts)
    check_columns(q, matrix(x), counts)


def check_rows(q, x, counts):
    format, rows = q.format, len(x) if counts is None else sum(counts)
    x = x[:rows]
    amax = nvfp4.spread_amax(x, (1 if format.row_scaled else WHOLE, WHOLE), counts)
    random = nvfp4.random_rows(x.shape, SEED) if format.stochastic_rounding else None
    wanted = nvfp4.quantize(x, (1, 16), amax, random=random, four_over_six=format.four_over_six)
    assert_same(q.row_codes[:rows], nvfp4.pack(wanted.nibbles))
    shape = (rows, q.row_scales.shape[1])
    assert_same(q.row_scales[:rows], scale_matrix(wanted.scales, shape, np.uint8))
    got = q.dequantize(Usage.ROWWISE).flatten(0, -2)[:rows]
    assert_same(got, definitions.rounded(wanted.values, str(q.dtype)[6:]))


def check_columns(q, x, counts):
    format, groups, capacity = q.format, counts or [len(x)], len(x)
    padded, sizes = nvfp4.padded_groups(x, groups)
    if format.hadamard:
        padded = nvfp4.rotate(padded)
    amax = nvfp4.spread_amax(padded, (WHOLE, 1 if format.row_scaled else WHOLE), sizes)
    random = nvfp4.random_columns(padded.shape, SEED) if format.stochastic_rounding else None
    wanted = nvfp4.quantize(
        padded, (16, 1), amax, sizes, random=random, four_over_six=format.four_over_six
    )
    nibbles, kept = wanted.nibbles, sizes
    if not format.hadamard:
        nibbles, kept = nvfp4.unpadded(nibbles, groups, capacity), groups
    packed = nvfp4.pack_columns(nibbles, kept, format.row_multiple)
    assert_same(q.column_codes.flatten()[: len(packed)], packed)
    assert not q.column_codes.flatten()[len(packed) :].any()
    shape = tuple(q.column_scales.shape)
    assert_same(q.column_scales, scale_matrix(wanted.scales, shape, np.uint8))
    values = nvfp4.rotate_back(wanted.values) if format.hadamard else wanted.values
    values = nvfp4.unpadded(values, groups, capacity)
    got = q.dequantize(Usage.COLUMNWISE).flatten(0, -2)
    assert_same(got, definitions.rounded(values, str(q.dtype)[6:]))


def check_tiles(x, counts=None, **options):
    """Tiles of a tensor: one set of codes."""
    format = dataclasses.replace(TILES, **options)
    given = x if counts is None else GroupedTensor.from_counts(x, counts)
    q = format.quantize(given)
    q = q if counts is None else q.data
    x_MK, rows = matrix(x), matrix(x).shape[0] if counts is None else sum(counts)
    amax = nvfp4.spread_amax(x_MK[:rows], (WHOLE, WHOLE), counts)
    wanted = nvfp4.quantize(x_MK[:rows], (16, 16), amax, counts, four_over_six=format.four_over_six)
    assert_same(q.codes[:rows], nvfp4.pack(wanted.nibbles))
    assert_same(q.scales, scale_matrix(wanted.scales, tuple(q.scales.shape), np.uint8))
    got = q.dequantize().flatten(0, -2)
    assert_same(got[:rows], definitions.rounded(wanted.values, str(x.dtype)[6:]))
    assert not got[rows:].any()


@by_shape
def test_rows_columns_and_tiles_are_the_definition(shape):
    check(values(shape))
    check_tiles(values(shape))


@by_dtype
def test_every_dtype_is_the_definition(dtype):
    check(values((33, 65), dtype))
    check_tiles(values((33, 65), dtype))


@by_options
@pytest.mark.parametrize("shape", [(1, 1), (33, 17), (40, 48)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_option_is_the_definition(shape, dtype, options):
    check(values(shape, dtype), **options)


@by_options
@by_dtype
@by_special
def test_special_values_are_the_definition(special, dtype, options):
    check(special_matrix(special, (17, 35)).to(dtype), **options)


@by_dtype
@by_special
@pytest.mark.parametrize("four_over_six", [False, True])
def test_special_values_in_tiles_are_the_definition(special, dtype, four_over_six):
    check_tiles(special_matrix(special, (17, 35)).to(dtype), four_over_six=four_over_six)


@by_options
@by_counts
def test_groups_are_the_definition_and_tails_are_never_read(counts, options):
    check(grouped_values(counts, 5)[0], counts, **options)


@by_counts
@pytest.mark.parametrize("four_over_six", [False, True])
def test_tiles_start_anew_in_every_group(counts, four_over_six):
    check_tiles(grouped_values(counts, 19)[0], counts, four_over_six=four_over_six)


@pytest.mark.parametrize("hadamard", [False, True])
def test_the_transposed_codes_of_all_groups_are_a_prefix(hadamard):
    format = dataclasses.replace(NVFP4, hadamard=hadamard)
    x, ends = grouped_values([32, 0, 64], 10, tail=32)
    q = format.quantize(GroupedTensor(x, ends), Usage.COLUMNWISE).data
    codes, scales = (
        valid(format, name, [32, 32, 96], len(x)) for name in ("column_codes", "column_scales")
    )
    # K times half of all rows, in bytes.
    assert codes == (32 + 64) // 2
    assert q.column_codes[:codes].numel() == 10 * (32 + 64) // 2
    clean = q.dequantize()
    q.column_codes[codes:] = 255
    q.column_scales[scales:] = 255
    assert torch.equal(q.dequantize(), clean)


@by_counts
@by_options
def test_bytes_past_the_valid_rows_are_never_read(counts, options):
    format = dataclasses.replace(NVFP4, **options)
    x, ends = grouped_values(counts, 7)
    q = format.quantize(GroupedTensor(x, ends), Usage.BOTH).data
    usages = (Usage.ROWWISE, Usage.COLUMNWISE)
    clean = [q.dequantize(usage)[: sum(counts)] for usage in usages]
    for name, buffer in q.buffers.items():
        rows = valid(format, name, ends, len(x))
        if rows is not None:
            buffer[rows:] = 0xFF if buffer.dtype is torch.uint8 else float("nan")
    for usage, wanted in zip(usages, clean, strict=True):
        assert torch.equal(q.dequantize(usage)[: sum(counts)], wanted)
    assert not q.dequantize(Usage.COLUMNWISE)[sum(counts) :].any()


def test_one_set_of_tiles_serves_both_usages():
    x = values((33, 65))
    q = TILES.quantize(x, Usage.BOTH)
    assert TILES.serves_both
    assert torch.equal(q.dequantize(Usage.ROWWISE), q.dequantize(Usage.COLUMNWISE))
    assert q.nbytes == TILES.saved_bytes(33, 65, x.dtype) == 33 * 33 + 3 * 5 + 4


def test_bytes_of_an_element_are_those_published():
    rows, columns = 1024, 512
    elements = rows * columns
    for usage, hadamard in itertools.product((Usage.ROWWISE, Usage.COLUMNWISE), (False, True)):
        format = dataclasses.replace(NVFP4, hadamard=hadamard)
        saved = format.saved_bytes(rows, columns, torch.bfloat16, usage)
        assert saved == elements // 2 + elements // 16 + 4


@by_dtype
def test_a_round_trip_keeps_the_tolerance_of_the_format(dtype):
    x = (torch.rand(65, 48) * 4 - 2).to(dtype)
    for options in ({}, {"two_d": True}, {"row_scaled": True}, {"stochastic_rounding": True}):
        format = dataclasses.replace(NVFP4, **options)
        for usage in (Usage.ROWWISE, Usage.COLUMNWISE):
            got = format.quantize(x, usage).dequantize()
            torch.testing.assert_close(got, x, rtol=format.rtol, atol=format.atol)


def test_the_transform_leaves_a_product_over_rows_as_it_is():
    x, dy = torch.randn(64, 24), torch.randn(64, 8)
    format = dataclasses.replace(NVFP4, hadamard=True)
    pair = [format.quantize(each, Usage.COLUMNWISE).dequantize() for each in (x, dy)]
    plain = [NVFP4.quantize(each, Usage.COLUMNWISE).dequantize() for each in (x, dy)]
    exact = dy.T @ x
    for one, other in (pair, plain):
        assert (other.T @ one - exact).norm() / exact.norm() < 0.2


def test_one_large_value_spoils_its_block_less_with_the_transform():
    x = torch.randn(64, 8)
    x[5] = 400.0
    errors = [
        (dataclasses.replace(NVFP4, hadamard=hadamard).quantize(x, Usage.COLUMNWISE).dequantize()
         - x)[:16].norm()
        for hadamard in (False, True)
    ]  # fmt: skip
    assert errors[1] < errors[0] * 8


@pytest.mark.fresh_draws
def test_draws_differ_from_call_to_call_and_come_again_with_torchs_seed():
    format = dataclasses.replace(NVFP4, stochastic_rounding=True)
    x = torch.rand(33, 40)
    torch.manual_seed(4)
    first, second = format.quantize(x, Usage.BOTH), format.quantize(x, Usage.BOTH)
    torch.manual_seed(4)
    again = format.quantize(x, Usage.BOTH)
    for name in ("row_codes", "column_codes"):
        assert torch.equal(first.buffers[name], again.buffers[name])
        assert not torch.equal(first.buffers[name], second.buffers[name])


@pytest.mark.parametrize("other", ["row_scaled", "hadamard"])
def test_options_that_contradict_tiles_are_refused(other):
    with pytest.raises(RecipeError, match=f"two_d gives.*{other} makes them differ; leave one"):
        dataclasses.replace(NVFP4, two_d=True, **{other: True})


@pytest.mark.parametrize("option", [field.name for field in dataclasses.fields(NVFP4)])
def test_a_switch_is_on_or_off(option):
    with pytest.raises(RecipeError, match=f"{option} must be True or False, got 'yes'"):
        dataclasses.replace(NVFP4, **{option: "yes"})
