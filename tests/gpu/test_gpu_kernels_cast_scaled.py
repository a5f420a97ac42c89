"""Codes with a float32 scale on a GPU against the reference on the CPU, byte for byte."""

import numpy as np
import pytest
import torch

import definitions
from backstash import kernels
from host_reads import no_host_reads
from quantizer_cases import (
    INF,
    NAN,
    TINY,
    by_code,
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

CODE_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def check(x, scale, code, ends=None, rows=None):
    """Codes, and the values of the codes; of the first ``rows`` rows."""
    code_dtype, ends_gpu = CODE_DTYPES[code], None if ends is None else ends.cuda()
    codes = kernels.quantize_scaled(x, scale, code_dtype, ends)
    wanted = kernels.dequantize_scaled(codes, scale, code_dtype, x.dtype, ends)
    x, scale = x.cuda(), scale.cuda()
    with no_host_reads():
        got_codes = kernels.quantize_scaled(x, scale, code_dtype, ends_gpu)
        got = kernels.dequantize_scaled(got_codes, scale, code_dtype, x.dtype, ends_gpu)
    assert_twin_bytes(got_codes[:rows], codes[:rows])
    assert_twin_bytes(got[:rows], wanted[:rows])
    if rows is not None:
        assert not got[rows:].any()


@by_code
def test_values_on_and_beside_every_rounding_boundary_get_the_references_code(code):
    points = np.concatenate([definitions.midpoints(code), definitions.magnitudes(code)])
    points = np.concatenate([points, [1e9, 3e38, INF, NAN, TINY, 3 * TINY]]).astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        around = [np.nextafter(points, np.float32(-INF)), np.nextafter(points, np.float32(INF))]
    x = torch.from_numpy(np.concatenate([points, *around, -points]))[None]
    check(x, torch.ones(1), code)


@by_code
def test_every_bfloat16_has_the_references_code(code):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for scale in (1.0, 0.37, 2.0**-120, definitions.FLOAT32_MAX):
        check(bits.view(torch.bfloat16).view(256, 256), torch.tensor([scale]), code)


@by_code
@by_dtype
@by_shape
def test_codes_and_values_are_the_references(shape, dtype, code):
    x = values(shape, dtype).flatten(0, -2)
    rows, columns = x.shape
    for scale_shape in ((1,), (rows, 1), (1, columns)):
        check(x, torch.rand(scale_shape) + 0.1, code)


@by_code
@by_counts
def test_groups_have_a_factor_each(counts, code):
    x, ends = grouped_values(counts, 72)
    for scale_shape in ((len(counts),), (len(counts), 72)):
        check(x, torch.rand(scale_shape) + 0.1, code, ends, sum(counts))


@by_special
def test_amax_ignores_nan(special):
    x = special_matrix(special)
    assert_twin_bytes(kernels.amax(x.cuda()), kernels.amax(x))


@by_dtype
@by_shape
def test_amax_is_the_references(shape, dtype):
    x = values(shape, dtype)
    assert_twin_bytes(kernels.amax(x.cuda()), kernels.amax(x))


@by_dtype
@by_counts
def test_group_amax_is_the_references_and_never_reads_the_tail(counts, dtype):
    x, ends = grouped_values(counts, 300)
    x = x.to(dtype)
    x[sum(counts) + 1 :] = INF
    assert_twin_bytes(kernels.group_amax(x.cuda(), ends.cuda()), kernels.group_amax(x, ends))


@pytest.mark.parametrize("counts", [[1100, 1031], [7, 0, 1] * 100], ids=["large", "many"])
def test_pairs_in_large_and_in_many_groups_are_the_references(counts):
    x, ends = grouped_values(counts, 96)
    x = x.bfloat16()
    x[:: len(x) // 40, ::3], x[5::700, 4] = NAN, INF
    assert_twin_bytes(kernels.group_amax(x.cuda(), ends.cuda()), kernels.group_amax(x, ends))
    assert_twin_bytes(kernels.column_amax(x.cuda(), ends.cuda()), kernels.column_amax(x, ends))
    for scale_shape in ((len(counts),), (len(counts), 96)):
        check(x, torch.rand(scale_shape) + 0.1, "e4m3", ends, sum(counts))


def test_a_thousand_random_splits_are_the_references():
    for counts, tail in random_counts(1000):
        x, ends = grouped_values(counts, 33, tail)
        assert_twin_bytes(kernels.group_amax(x.cuda(), ends.cuda()), kernels.group_amax(x, ends))
        check(x, torch.rand(len(counts)) + 0.1, "e4m3", ends, sum(counts))


@pytest.mark.parametrize("power_of_two", [False, True], ids=["exact", "power-of-two"])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3, 2.0**-140], ids=["no-epsilon", "1e-3", "tiny"])
def test_scale_from_amax_is_the_references(epsilon, power_of_two):
    random = torch.exp2(torch.empty(1000).uniform_(-149, 127))
    corners = [0.0, INF, NAN, TINY, 2.0**-126, 1e-4, 1.0, 448.0, definitions.FLOAT32_MAX]
    amax = torch.cat([torch.tensor(corners), random])
    for value_for_inf in (definitions.FLOAT32_MAX, 65504.0):
        options = {"epsilon": epsilon, "power_of_two": power_of_two, "largest": 448.0}
        wanted = kernels.scale_from_amax(amax, value_for_inf=value_for_inf, **options)
        got = kernels.scale_from_amax(amax.cuda(), value_for_inf=value_for_inf, **options)
        assert_twin_bytes(got, wanted)
