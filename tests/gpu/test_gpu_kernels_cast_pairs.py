"""Pairs of bfloat16: products with powers of two are exact, and a NaN is no magnitude."""

import pytest
import torch

from backstash import kernels
from twin_cases import assert_twin_bytes

pytestmark = pytest.mark.gpu

by_code = pytest.mark.parametrize(
    "code", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"]
)


@by_code
def test_values_below_every_exponent_are_cast_as_by_the_reference(code):
    # A block for each exponent of its largest value, which is in a random row.
    largest = (torch.arange(255)[:, None, None] << 7) | torch.randint(128, (255, 1, 64))
    bits = torch.randint(2**15, (255, 128, 64)) % (largest + 1)
    bits.scatter_(1, torch.randint(128, (255, 1, 64)), largest)
    signs = torch.randint(2, bits.shape) << 15
    x = (bits | signs).to(torch.int16).view(torch.bfloat16).view(-1, 64)
    got = kernels.quantize_block_columns(x.cuda(), code)
    for one, other in zip(got, kernels.quantize_block_columns(x, code), strict=True):
        assert_twin_bytes(one, other)


@by_code
def test_the_magnitude_of_a_pair_with_nan_is_that_of_the_numbers(code):
    x = torch.tensor([[float("nan"), 1.0], [-3.0, float("nan")], [float("nan")] * 2, [0.5, -2.0]])
    x = x.bfloat16().repeat(32, 16)
    got = kernels.quantize_block_both(x.cuda(), code)
    for pair, wanted in zip(got, kernels.quantize_block_both(x, code), strict=True):
        for one, other in zip(pair, wanted, strict=True):
            assert_twin_bytes(one, other)
