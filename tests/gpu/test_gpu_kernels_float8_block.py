"""Blocks of 128 on a GPU against the reference on the CPU, byte for byte."""

import pytest
import torch

from backstash import kernels
from host_reads import no_host_reads
from quantizer_cases import (
    by_counts,
    by_dtype,
    by_shape,
    by_special,
    grouped_values,
    special_matrix,
    values,
)
from twin_cases import assert_twin_bytes, random_counts

pytestmark = pytest.mark.gpu

BY_DIRECTION = {
    "rows": (kernels.quantize_block_rows, kernels.dequantize_block_rows),
    "columns": (kernels.quantize_block_columns, kernels.dequantize_block_columns),
    "tiles": (kernels.quantize_block_tiles, kernels.dequantize_block_tiles),
}
by_direction = pytest.mark.parametrize("direction", BY_DIRECTION)


def check(direction, x, ends=None, rows=None, code=torch.float8_e4m3fn, **options):
    """Codes, scales and values; of a grouped matrix the codes of its first ``rows`` rows."""
    quantize, dequantize = BY_DIRECTION[direction]
    given = () if ends is None else (ends,)
    codes, scale_inv = quantize(x, code, *given, **options)
    with no_host_reads():
        on_gpu = tuple(value.cuda(non_blocking=True) for value in given)
        got_codes, got_scale_inv = quantize(x.cuda(non_blocking=True), code, *on_gpu, **options)
        got = dequantize(got_codes, got_scale_inv, code, x.dtype, *on_gpu)
    assert_twin_bytes(got_codes[:rows], codes[:rows])
    assert_twin_bytes(got_scale_inv, scale_inv)
    assert_twin_bytes(got, dequantize(codes, scale_inv, code, x.dtype, *given))


@by_direction
@by_dtype
@by_shape
def test_codes_scales_and_values_are_the_references(shape, dtype, direction):
    check(direction, values(shape, dtype).flatten(0, -2))


@by_direction
@by_special
def test_special_values_are_the_references(special, direction):
    x = special_matrix(special, (140, 150))
    for code in (torch.float8_e4m3fn, torch.float8_e5m2):
        for power_of_two in (False, True):
            check(direction, x, code=code, power_of_two=power_of_two)
    check(direction, x.bfloat16(), epsilon=1e-3)


@pytest.mark.parametrize("direction", ["columns", "tiles"])
@by_dtype
@by_counts
def test_groups_are_the_references(counts, dtype, direction):
    x, ends = grouped_values([count * 3 for count in counts], 200)
    check(direction, x.to(dtype), ends, 3 * sum(counts))


@pytest.mark.parametrize("grouped", [False, True], ids=["matrix", "groups"])
@pytest.mark.parametrize("columns", [7, 128, 300, 2048])
def test_one_pass_gives_what_two_give(columns, grouped):
    x, ends = grouped_values([130, 0, 256, 1, 95], columns)
    x, rows = x.cuda(), 482
    given, code = ((ends.cuda(),) if grouped else ()), torch.float8_e4m3fn
    got_rows, got_columns = kernels.quantize_block_both(x, code, *given)
    for got, wanted in zip(got_rows, kernels.quantize_block_rows(x, code), strict=True):
        assert_twin_bytes(got[:rows], wanted[:rows])
    codes, scale_inv = kernels.quantize_block_columns(x, code, *given)
    assert_twin_bytes(got_columns[0][:rows], codes[:rows])
    assert_twin_bytes(got_columns[1], scale_inv)


def test_three_hundred_random_splits_are_the_references():
    for counts, tail in random_counts(300):
        x, ends = grouped_values([count * 3 for count in counts], 33, tail)
        check("columns", x, ends, 3 * sum(counts))
