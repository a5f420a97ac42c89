"""Products on blocks of 128 on a Hopper GPU, where the rows of codes are whole units."""

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
@pytest.mark.parametrize("name", ["blocks", "blocks-float32-scales", "blocks-e5m2"])
def test_products_are_those_of_the_dequantized_values(name, shape, weight_blocks, monkeypatch):
    launched = launches(monkeypatch, quantized_matmul, "hopper_block_kernel")
    check_products(name, shape, weight_blocks)
    assert len(launched) == 6


@by_tiles
@by_whole_shape
def test_sums_that_need_no_rounding_are_exact(shape, weight_blocks):
    check_exact_sums("blocks", shape, weight_blocks)
