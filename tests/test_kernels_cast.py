"""Casts, scales and blocks against the definition, bit for bit."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import definitions
from backstash import kernels
from quantizer_cases import (
    INF,
    NAN,
    TINY,
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

CODE_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
ONE = torch.ones(1)


def neighbours(points: np.ndarray) -> np.ndarray:
    """Each point and the float32 just below and above, with both signs."""
    points = points.astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        below, above = (np.nextafter(points, np.float32(end)) for end in (-INF, INF))
    positive = np.concatenate([below, points, above])
    return np.concatenate([positive, -positive])


def as_matrix(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x.astype(np.float32)).reshape(1, -1)


# --- one code ----------------------------------------------------------------------------------


@by_code
def test_values_on_and_beside_every_rounding_boundary_get_the_nearest_even_code(code):
    middle = definitions.midpoints(code)
    largest = definitions.LARGEST[code]
    beyond = np.array([largest, largest * 17 / 16, largest * 2, definitions.FLOAT32_MAX])
    x = neighbours(np.concatenate([middle, definitions.magnitudes(code), beyond]))
    codes = kernels.quantize_scaled(as_matrix(x), ONE, CODE_DTYPES[code])
    assert_same(codes, definitions.encode(x, code))


@by_code
def test_every_code_comes_back_as_itself(code):
    count = definitions.FIELDS[code][2]
    codes = np.array([*range(count), *range(0x80, 0x80 + count)], np.uint8)
    quantized = torch.from_numpy(codes).reshape(1, -1)
    got = kernels.dequantize_scaled(quantized, ONE, CODE_DTYPES[code], torch.float32)
    assert_same(got, definitions.decode(codes, code))
    assert_same(kernels.quantize_scaled(got, ONE, CODE_DTYPES[code]), codes)


@by_code
def test_a_nan_has_one_code_whatever_its_sign_and_infinity_is_the_largest(code):
    x = torch.tensor([[NAN, -NAN, INF, -INF, 0.0, -0.0]])
    codes = kernels.quantize_scaled(x, ONE, CODE_DTYPES[code])
    top = definitions.FIELDS[code][2] - 1
    assert codes.tolist() == [[0x7F, 0x7F, top, top + 0x80, 0, 0x80]]


@by_code
@by_special
def test_scaled_codes_are_those_of_the_float32_product(special, code):
    x = special_matrix(special)
    for scale in (1.0, 3.7, 2.0**-120, definitions.FLOAT32_MAX):
        codes = kernels.quantize_scaled(x, torch.tensor([scale]), CODE_DTYPES[code])
        exact = float(np.float32(scale))
        assert_same(codes, definitions.float8(matrix(x), exact, code))


@by_code
@by_dtype
def test_scaled_codes_and_values_in_every_dtype(dtype, code):
    x, scale = values((33, 65), dtype), torch.tensor([0.37])
    codes = kernels.quantize_scaled(x, scale, CODE_DTYPES[code])
    assert_same(codes, definitions.float8(matrix(x), scale.item(), code))
    got = kernels.dequantize_scaled(codes, scale, CODE_DTYPES[code], dtype)
    wanted = definitions.float8_values(codes.numpy(), scale.item(), code)
    assert got.dtype is dtype
    assert_same(got, definitions.rounded(wanted, str(dtype)[6:]))


# --- largest magnitudes and scales -------------------------------------------------------------


@by_special
def test_amax_ignores_nan(special):
    x = special_matrix(special)
    assert kernels.amax(x).tolist() == [definitions.amax(matrix(x))]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)], ids=["no-rows", "no-columns"])
def test_amax_of_nothing_is_zero(shape):
    ends = torch.tensor([0, shape[0]], dtype=torch.int32)
    assert kernels.amax(torch.ones(shape)).tolist() == [0.0]
    assert kernels.group_amax(torch.ones(shape), ends).tolist() == [0.0, 0.0]


@by_dtype
@by_counts
def test_group_amax_is_that_of_each_groups_rows_and_never_of_the_tail(counts, dtype):
    x, ends = grouped_values(counts, 7)
    x = x.to(dtype)
    x[sum(counts) + 1 :] = INF
    groups = np.split(matrix(x)[: sum(counts)], np.cumsum(counts)[:-1])
    assert kernels.group_amax(x, ends).tolist() == [definitions.amax(group) for group in groups]


@pytest.mark.parametrize("power_of_two", [False, True], ids=["exact", "power-of-two"])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3, 2.0**-140], ids=["no-epsilon", "1e-3", "tiny"])
@by_code
def test_scale_from_amax_at_its_corners(code, epsilon, power_of_two):
    largest = definitions.LARGEST[code]
    random = np.exp2(np.random.uniform(-149, 127, 200)).astype(np.float32).tolist()
    amaxes = [0.0, INF, NAN, TINY, 2.0**-126, 1e-4, 1.0, 448.0, definitions.FLOAT32_MAX, *random]
    got = kernels.scale_from_amax(
        torch.tensor(amaxes), largest=largest, epsilon=epsilon, power_of_two=power_of_two
    )
    wanted = [definitions.scale_from_amax(amax, largest, epsilon=epsilon) for amax in amaxes]
    if power_of_two:
        wanted = [definitions.power_of_two_below(scale) for scale in wanted]
    assert got.tolist() == wanted


def test_a_scale_too_large_for_float32_becomes_the_value_asked_for():
    amax = torch.tensor([TINY, 1.0])
    got = kernels.scale_from_amax(amax, largest=448.0, value_for_inf=65504.0)
    assert got.tolist() == [65504.0, 448.0]
    got = kernels.scale_from_amax(amax, largest=448.0, value_for_inf=65504.0, power_of_two=True)
    assert got.tolist() == [32768.0, 256.0]


# --- blocks of 32 ------------------------------------------------------------------------------


@by_dtype
@by_shape
def test_mx_rows_and_columns_are_the_definition(shape, dtype):
    x = values(shape, dtype).flatten(0, -2)
    check_mx(x, dtype)


@by_special
def test_mx_blocks_of_special_values_are_the_definition(special):
    check_mx(special_matrix(special), torch.float32)


def check_mx(x, dtype):
    """Codes, exponents and values of both directions."""
    name = str(dtype)[6:]
    codes, exponents = kernels.quantize_mx_rows(x)
    wanted_codes, wanted_exponents = definitions.mx_rows(matrix(x))
    assert_same(codes, wanted_codes)
    assert_same(exponents, wanted_exponents)
    got = kernels.dequantize_mx_rows(codes, exponents, dtype)
    wanted = definitions.mx_row_values(wanted_codes, wanted_exponents)
    assert_same(got, definitions.rounded(wanted, name))
    codes, exponents = kernels.quantize_mx_columns(x)
    wanted_codes, wanted_exponents = definitions.mx_columns(matrix(x))
    assert_same(codes, wanted_codes)
    assert_same(exponents, wanted_exponents)
    got = kernels.dequantize_mx_columns(codes, exponents, dtype)
    wanted = definitions.mx_column_values(wanted_codes, wanted_exponents)
    assert_same(got, definitions.rounded(wanted, name))


def test_an_exponent_is_rounded_up_beside_every_power_of_two():
    # One block each: the amax that gives exactly a power of two times 448, and its neighbours.
    scaled = 448.0 * definitions.POWERS
    x = neighbours(scaled[scaled < definitions.FLOAT32_MAX])
    subnormal = np.arange(1, 600) * np.float64(TINY)
    x = np.concatenate([x, subnormal, [INF, definitions.FLOAT32_MAX, 0.0]])
    block = torch.zeros(len(x), 32)
    block[:, 17] = torch.from_numpy(x.astype(np.float32))
    codes, exponents = kernels.quantize_mx_rows(block)
    assert_same(exponents[:, 0], definitions.mx_exponent(np.abs(np.float32(x))))
    assert_same(codes[:, 17], definitions.mx_rows(matrix(block))[0][:, 17])


def test_every_exponent_is_read_as_its_power_of_two_and_255_as_nan():
    exponents = torch.arange(256, dtype=torch.uint8)[:, None]
    codes = torch.full((256, 1), 0x39, dtype=torch.uint8)  # 1.125
    wanted = definitions.product(np.full(256, 1.125), definitions.mx_power(np.arange(256)))
    assert_same(kernels.dequantize_mx_rows(codes, exponents, torch.float32), wanted)
    got = kernels.dequantize_mx_columns(codes[:1].expand(1, 256), exponents.T, torch.float32)
    assert_same(got, wanted)


def test_a_nan_stays_alone_in_its_block():
    x = torch.full((32, 32), 3.0)
    x[5, 7] = NAN
    for quantize in (kernels.quantize_mx_rows, kernels.quantize_mx_columns):
        codes, exponents = quantize(x)
        assert (codes == 0x7F).sum() == 1
        assert codes[5, 7] == 0x7F
        assert exponents.unique().numel() == 1


def test_no_finite_value_saturates_and_none_is_a_power_of_two_too_small():
    x = values((64, 64))
    codes, exponents = kernels.quantize_mx_rows(x)
    biggest = kernels.dequantize_mx_rows(codes, exponents, torch.float32).unflatten(1, (-1, 32))
    share = biggest.abs().amax(-1) / torch.from_numpy(definitions.mx_power(exponents.numpy()))
    assert share.max() <= 448.0
    assert share.min() >= 224.0


@by_dtype
@by_counts
def test_mx_columns_start_anew_in_every_group(counts, dtype):
    x, ends = grouped_values(counts, 9)
    check_mx_groups(x.to(dtype), counts, ends)


def check_mx_groups(x, counts, ends):
    """Codes of the groups, all exponents, and values with a tail of zeros."""
    rows = sum(counts)
    codes, exponents = kernels.quantize_mx_columns(x, ends)
    wanted_codes, wanted_exponents = definitions.mx_group_columns(matrix(x), counts)
    assert codes.shape == x.shape
    assert_same(codes[:rows], wanted_codes[:rows])
    assert_same(exponents, wanted_exponents)
    got = kernels.dequantize_mx_columns(codes, exponents, x.dtype, ends)
    wanted = definitions.mx_group_column_values(wanted_codes, wanted_exponents, counts)
    assert_same(got, definitions.rounded(wanted, str(x.dtype)[6:]))
    blocks = [math.ceil(count / kernels.MX_BLOCK) for count in counts]
    assert_same(kernels.block_ends(ends, len(x), kernels.MX_BLOCK), np.cumsum(blocks))


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(0, 70), min_size=1, max_size=6),
    columns=st.integers(1, 5),
    tail=st.integers(0, 40),
)
def test_mx_columns_of_any_groups(counts, columns, tail):
    x, ends = grouped_values(counts, columns, tail)
    check_mx_groups(x, counts, ends)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 70), columns=st.integers(0, 70))
def test_mx_of_any_shape(rows, columns):
    check_mx(values((rows, columns)), torch.float32)


def test_ends_past_the_buffer_are_cut_at_it():
    x = values((40, 3))
    wanted = kernels.quantize_mx_columns(x, torch.tensor([10, 40, 40], dtype=torch.int32))
    got = kernels.quantize_mx_columns(x, torch.tensor([10, 50, 90], dtype=torch.int32))
    assert torch.equal(got[0], wanted[0])
    assert torch.equal(got[1], wanted[1])


@by_counts
def test_scaled_groups_have_a_factor_each(counts):
    x, ends = grouped_values(counts, 9)
    scale = torch.arange(1, len(counts) + 1).float() / 3
    codes = kernels.quantize_scaled(x, scale, torch.float8_e4m3fn, ends)
    got = kernels.dequantize_scaled(codes, scale, torch.float8_e4m3fn, torch.float32, ends)
    start = 0
    for count, factor in zip(counts, scale.tolist(), strict=True):
        rows = slice(start, start + count)
        wanted = definitions.float8(matrix(x[rows]), factor, "e4m3")
        assert_same(codes[rows], wanted)
        assert_same(got[rows], definitions.float8_values(wanted, factor, "e4m3"))
        start += count


# --- memory ------------------------------------------------------------------------------------

LAYOUTS = {
    "transposed": lambda: values((65, 40)).T,
    "every-second": lambda: values((80, 130))[::2, ::2],
    "repeated": lambda: values((1, 65)).expand(40, 65),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_results_are_contiguous_and_the_same_from_any_strides(make):
    x = make()
    ends = torch.tensor([7, 40], dtype=torch.int32)

    def quantize(x):
        return (
            kernels.quantize_scaled(x, ONE, torch.float8_e4m3fn),
            *kernels.quantize_mx_rows(x),
            *kernels.quantize_mx_columns(x),
            *kernels.quantize_mx_columns(x, ends),
        )

    assert not x.is_contiguous()
    for got, wanted in zip(quantize(x), quantize(x.contiguous()), strict=True):
        assert got.is_contiguous()
        assert torch.equal(got, wanted)
