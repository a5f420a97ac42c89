"""Products on codes in blocks of 128 on a GPU against float64 products of their values."""

import pytest
import torch

from quantized_mm_cases import (
    KINDS,
    assert_product,
    by_shape,
    by_tiles,
    float8_sum,
    multiplied_on_gpu,
    products,
    signs,
)

pytestmark = pytest.mark.gpu
NAMES = ["blocks", "blocks-float32-scales", "blocks-e5m2"]
by_code = pytest.mark.parametrize("kind", [KINDS[name] for name in NAMES], ids=NAMES)


@by_tiles
@by_shape
@by_code
def test_products_are_those_of_the_dequantized_values(kind, shape, weight_blocks):
    for product in products(kind, shape, weight_blocks):
        for dtype in (torch.bfloat16, torch.float32):
            got = multiplied_on_gpu(product, dtype)
            assert got.dtype is dtype
            assert_product(got, product, float8_sum(product.terms))


@by_tiles
@by_shape
@pytest.mark.parametrize("kind", [KINDS["blocks"], KINDS["blocks-e5m2"]], ids=["e4m3", "e5m2"])
def test_sums_that_need_no_rounding_are_exact(kind, shape, weight_blocks):
    for product in products(kind, shape, weight_blocks, signs):
        got = multiplied_on_gpu(product, torch.float32)
        assert torch.equal(got.cpu().double(), product.exact)
