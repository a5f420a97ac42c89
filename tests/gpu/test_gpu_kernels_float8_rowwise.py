"""Float8 by rows and columns on a GPU against the reference on the CPU, byte for byte."""

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

OPTIONS = {"plain": {}, "power-of-two": {"power_of_two": True}, "epsilon": {"epsilon": 1e-3}}
by_option = pytest.mark.parametrize("option", OPTIONS)
ROWS = (kernels.quantize_float8_rows, kernels.dequantize_float8_rows)
COLUMNS = (kernels.quantize_float8_columns, kernels.dequantize_float8_columns)


def check(twins, x, ends=None, rows=None, code=torch.float8_e4m3fn, **options):
    """Codes, scales and values; of a grouped matrix the codes of its first ``rows`` rows."""
    quantize, dequantize = twins
    given = () if ends is None else (ends,)
    codes, scale_inv = quantize(x, code, *given, **options)
    with no_host_reads():
        on_gpu = tuple(value.cuda(non_blocking=True) for value in given)
        got_codes, got_scale_inv = quantize(x.cuda(non_blocking=True), code, *on_gpu, **options)
        got = dequantize(got_codes, got_scale_inv, code, x.dtype, *on_gpu)
    assert_twin_bytes(got_codes[:rows], codes[:rows])
    assert_twin_bytes(got_scale_inv, scale_inv)
    assert_twin_bytes(got, dequantize(codes, scale_inv, code, x.dtype, *given))


@by_dtype
@by_shape
def test_codes_scales_and_values_are_the_references(shape, dtype):
    x = values(shape, dtype).flatten(0, -2)
    check(ROWS, x)
    check(COLUMNS, x)
    assert_twin_bytes(kernels.row_amax(x.cuda()), kernels.row_amax(x))


@by_option
@by_special
def test_special_values_are_the_references(special, option):
    for code in (torch.float8_e4m3fn, torch.float8_e5m2):
        for twins in (ROWS, COLUMNS):
            check(twins, special_matrix(special), code=code, **OPTIONS[option])


@by_dtype
@by_counts
def test_groups_are_the_references(counts, dtype):
    x, ends = grouped_values(counts, 72)
    check(COLUMNS, x.to(dtype), ends, sum(counts))
    amax = kernels.column_amax(x.cuda(), ends.cuda())
    assert_twin_bytes(amax, kernels.column_amax(x, ends))


def test_rows_of_many_columns_are_the_references():
    check(ROWS, values((5, 9001), torch.bfloat16))


@pytest.mark.parametrize("columns", [33, 160])
def test_hundreds_of_random_splits_are_the_references(columns):
    for counts, tail in random_counts(150):
        x, ends = grouped_values(counts, columns, tail)
        check(COLUMNS, x.bfloat16() if columns == 160 else x, ends, sum(counts))
