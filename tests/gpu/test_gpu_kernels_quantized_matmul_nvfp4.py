"""Products on NVFP4 codes on a GPU against float64 products of what the codes stand for."""

import pytest

from quantized_mm_cases import by_shape, by_tiles, check_products

pytestmark = pytest.mark.gpu


@by_tiles
@by_shape
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-row-scaled", "nvfp4-rotated"])
def test_products_are_those_of_the_dequantized_values(name, shape, weight_blocks):
    check_products(name, shape, weight_blocks)
