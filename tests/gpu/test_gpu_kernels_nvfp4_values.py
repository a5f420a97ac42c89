"""Values of NVFP4 codes on a GPU against the reference on the CPU, bit for bit."""

import pytest
import torch

from backstash import kernels
from quantizer_cases import by_counts, grouped_values, values
from twin_cases import assert_twin_bytes, random_counts

pytestmark = pytest.mark.gpu

R = kernels.hadamard_matrix(torch.device("cpu"))
by_rotation = pytest.mark.parametrize("rotation", [None, R], ids=["plain", "rotated"])


def on_gpu(value):
    return value.cuda() if isinstance(value, torch.Tensor) else value


def check_columns(x, ends, rotation):
    """Blocks down columns, whose bytes may begin anywhere and end with their buffer."""
    amax = kernels.amax(x) if ends is None else kernels.group_amax(x, ends)
    codes, scales = kernels.quantize_nvfp4_columns(x, amax, ends, rotation)
    given = (scales, amax, len(x), x.dtype, ends, rotation)
    wanted = kernels.dequantize_nvfp4_columns(codes, *given)
    # The bytes around those of the buffer are no codes.
    around = torch.full((len(codes) + 16,), 0x77, dtype=torch.uint8, device="cuda")
    for start in (4, 7):
        around[start : start + len(codes)] = codes.cuda()
        placed = around[start : start + len(codes)]
        on_device = scales.cuda(), amax.cuda(), len(x), x.dtype, on_gpu(ends), on_gpu(rotation)
        got = kernels.dequantize_nvfp4_columns(placed, *on_device)
        assert_twin_bytes(got, wanted)


@by_rotation
@by_counts
def test_groups_down_columns_are_the_references(counts, rotation):
    for columns in (7, 64):
        check_columns(*grouped_values(counts, columns), rotation)


@by_rotation
@pytest.mark.parametrize("rows", [1, 2, 15, 17, 33])
def test_a_matrix_down_columns_is_the_references(rows, rotation):
    for columns in (1, 5, 80):
        check_columns(values((rows, columns), torch.bfloat16), None, rotation)


def test_random_splits_down_columns_are_the_references():
    for counts, tail in random_counts(50):
        x, ends = grouped_values(counts, 33, tail)
        check_columns(x.bfloat16(), ends, None)


@by_counts
@pytest.mark.parametrize("direction", ["rows", "tiles"])
def test_groups_along_rows_are_the_references(counts, direction):
    x, ends = grouped_values(counts, 70)
    amax = kernels.group_amax(x, ends)
    codes, scales = getattr(kernels, f"quantize_nvfp4_{direction}")(x, amax, ends)
    given = (codes, scales, amax, 70, torch.bfloat16, ends)
    dequantize = getattr(kernels, f"dequantize_nvfp4_{direction}")
    got, wanted = dequantize(*map(on_gpu, given)), dequantize(*given)
    assert_twin_bytes(got[: int(ends[-1])], wanted[: int(ends[-1])])
    assert not got[int(ends[-1]) :].any()
