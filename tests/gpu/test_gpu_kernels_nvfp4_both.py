"""NVFP4 in both directions from one launch: what one launch for each gives."""

import pytest
import torch

from backstash import kernels
from host_reads import no_host_reads
from quantizer_cases import grouped_values, values
from twin_cases import assert_twin_bytes, random_counts

pytestmark = pytest.mark.gpu

SEED = torch.tensor([11, 12])
R = kernels.hadamard_matrix(torch.device("cpu"))


def on_gpu(value):
    return None if value is None else value.cuda()


def check(x, ends=None, rotation=None, seed=None, row_scaled=False, four_over_six=False):
    """Every byte, but for rows past the last group along rows."""
    rows = len(x) if ends is None else int(ends[-1])
    x, ends, rotation, seed = x.cuda(), on_gpu(ends), on_gpu(rotation), on_gpu(seed)
    if row_scaled:
        amax = kernels.row_amax(x), kernels.column_amax(x, ends)
    else:
        one = kernels.amax(x) if ends is None else kernels.group_amax(x, ends)
        amax = one, one
    with no_host_reads():
        got_rows, got_columns = kernels.quantize_nvfp4_both(
            x, amax, ends, rotation, seed, four_over_six=four_over_six
        )
    wanted = kernels.quantize_nvfp4_rows(x, amax[0], ends, seed, four_over_six=four_over_six)
    for got, expected in zip(got_rows, wanted, strict=True):
        assert_twin_bytes(got[:rows], expected[:rows])
    wanted = kernels.quantize_nvfp4_columns(
        x, amax[1], ends, rotation, seed, four_over_six=four_over_six
    )
    for got, expected in zip(got_columns, wanted, strict=True):
        assert_twin_bytes(got, expected)


@pytest.mark.parametrize("grouped", [False, True], ids=["matrix", "groups"])
@pytest.mark.parametrize("columns", [7, 64, 300, 2048])
def test_one_launch_gives_what_two_give(columns, grouped):
    x, ends = grouped_values([33, 0, 64, 1, 95], columns)
    check(x.bfloat16() if grouped else x.bfloat16()[:193], ends if grouped else None)


@pytest.mark.parametrize("grouped", [False, True], ids=["matrix", "groups"])
@pytest.mark.parametrize(
    "options",
    [{"rotation": R}, {"row_scaled": True}, {"rotation": R, "seed": SEED, "four_over_six": True}],
    ids=["rotated", "row-scaled", "rotated-random-four-over-six"],
)
def test_every_option_gives_the_same(options, grouped):
    x, ends = grouped_values([33, 0, 64, 1, 95], 96)
    check(x if grouped else x[:193], ends if grouped else None, **options)


@pytest.mark.parametrize("shape", [(0, 64), (5, 0), (1, 1)], ids=str)
def test_matrices_of_next_to_nothing_give_the_same(shape):
    check(values(shape))


def test_random_splits_give_the_same():
    for counts, tail in random_counts(100):
        x, ends = grouped_values(counts, 96, tail)
        check(x, ends)


def test_what_lies_past_the_two_thousand_millionth_value_is_cast_like_the_rest():
    rows, columns, last = 2**20 + 64, 2048, 48
    x = torch.randn(1, columns, device="cuda", dtype=torch.bfloat16).expand(rows, -1).contiguous()
    x[-last:] = torch.randn(last, columns, device="cuda", dtype=torch.bfloat16)
    amax = kernels.amax(x[-last:])
    (codes, scales), (column_codes, column_scales) = kernels.quantize_nvfp4_both(x, (amax, amax))
    wanted = kernels.quantize_nvfp4_both(x[-last:], (amax, amax))
    assert_twin_bytes(codes[-last:], wanted[0][0])
    assert_twin_bytes(scales[-last:], wanted[0][1])
    assert_twin_bytes(column_scales[-last // 16 :], wanted[1][1])
    got = kernels.dequantize_nvfp4_columns(column_codes, column_scales, amax, rows, x.dtype)
    read = (*wanted[1], amax, last, x.dtype)
    assert_twin_bytes(got[-last:], kernels.dequantize_nvfp4_columns(*read))
    got = kernels.dequantize_nvfp4_rows(codes, scales, amax, columns, x.dtype)
    read = (*wanted[0], amax, columns, x.dtype)
    assert_twin_bytes(got[-last:], kernels.dequantize_nvfp4_rows(*read))
