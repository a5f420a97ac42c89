"""Products on MXFP8 codes on a GPU against float64 products of what the codes stand for."""

import pytest

from quantized_mm_cases import by_shape, by_tiles, check_exact_sums, check_products

pytestmark = pytest.mark.gpu


@by_tiles
@by_shape
def test_products_are_those_of_the_dequantized_values(shape, weight_blocks):
    check_products("mxfp8", shape, weight_blocks)


@by_tiles
@by_shape
def test_sums_that_need_no_rounding_are_exact(shape, weight_blocks):
    check_exact_sums("mxfp8", shape, weight_blocks)
