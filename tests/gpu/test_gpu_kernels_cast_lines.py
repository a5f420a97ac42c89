"""Lines that share a scale, short ones and those too long for a program's registers."""

import pytest
import torch

from backstash import kernels
from quantizer_cases import values
from twin_cases import assert_twin_bytes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("columns", [1, 16, 100, 127, 128, 129, 1024, 5000, 16384, 16385, 40_000])
def test_lines_of_any_length_are_the_references(columns):
    x = values((5, columns), torch.bfloat16)
    for quantize in (kernels.quantize_float8_rows, kernels.quantize_block_rows):
        for power_of_two in (False, True):
            wanted = quantize(x, torch.float8_e4m3fn, power_of_two=power_of_two)
            got = quantize(x.cuda(), torch.float8_e4m3fn, power_of_two=power_of_two)
            for one, other in zip(got, wanted, strict=True):
                assert_twin_bytes(one, other)
    assert_twin_bytes(kernels.row_amax(x.cuda()), kernels.row_amax(x))
