"""Products on MXFP8 codes on a Hopper GPU, where the rows of codes are whole units."""

import pytest

from backstash.kernels import quantized_matmul
from quantized_mm_cases import (
    by_tiles,
    by_whole_shape,
    check_exact_sums,
    check_products,
    launches,
    on_hopper,
)

pytestmark = [pytest.mark.gpu, on_hopper]


@by_tiles
@by_whole_shape
def test_products_are_those_of_the_dequantized_values(shape, weight_blocks, monkeypatch):
    launched = launches(monkeypatch, quantized_matmul, "hopper_mx_kernel")
    check_products("mxfp8", shape, weight_blocks)
    assert len(launched) == 6


@by_tiles
@by_whole_shape
def test_sums_that_need_no_rounding_are_exact(shape, weight_blocks):
    check_exact_sums("mxfp8", shape, weight_blocks)
