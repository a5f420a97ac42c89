"""Products on codes in blocks of 128 on a GPU against float64 products of their values."""

import pytest

from quantized_mm_cases import by_shape, by_tiles, check_exact_sums, check_products

pytestmark = pytest.mark.gpu


@by_tiles
@by_shape
@pytest.mark.parametrize("name", ["blocks", "blocks-float32-scales", "blocks-e5m2"])
def test_products_are_those_of_the_dequantized_values(name, shape, weight_blocks):
    check_products(name, shape, weight_blocks)


@by_tiles
@by_shape
@pytest.mark.parametrize("name", ["blocks", "blocks-e5m2"])
def test_sums_that_need_no_rounding_are_exact(name, shape, weight_blocks):
    check_exact_sums(name, shape, weight_blocks)
