"""Products on NVFP4 codes on a GPU against float64 products of what the codes stand for."""

import pytest
import torch

from quantized_mm_cases import (
    KINDS,
    assert_product,
    by_shape,
    by_tiles,
    multiplied_on_gpu,
    nvfp4_sum,
    products,
)

pytestmark = pytest.mark.gpu
NAMES = ["nvfp4", "nvfp4-row-scaled", "nvfp4-rotated"]


@by_tiles
@by_shape
@pytest.mark.parametrize("kind", [KINDS[name] for name in NAMES], ids=NAMES)
def test_products_are_those_of_the_dequantized_values(kind, shape, weight_blocks):
    for product in products(kind, shape, weight_blocks):
        for dtype in (torch.bfloat16, torch.float32):
            got = multiplied_on_gpu(product, dtype)
            assert got.dtype is dtype
            assert_product(got, product, nvfp4_sum(product.terms))
