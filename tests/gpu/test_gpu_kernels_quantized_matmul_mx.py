"""Products on MXFP8 codes on a GPU against float64 products of what the codes stand for."""

import pytest
import torch

from quantized_mm_cases import (
    KINDS,
    assert_product,
    bfloat16_sum,
    by_shape,
    by_tiles,
    multiplied_on_gpu,
    products,
    signs,
)

pytestmark = pytest.mark.gpu
KIND = KINDS["mxfp8"]


@by_tiles
@by_shape
def test_products_are_those_of_the_dequantized_values(shape, weight_blocks):
    for product in products(KIND, shape, weight_blocks):
        for dtype in (torch.bfloat16, torch.float32):
            got = multiplied_on_gpu(product, dtype)
            assert got.dtype is dtype
            assert_product(got, product, bfloat16_sum(product.terms))


@by_tiles
@by_shape
def test_sums_that_need_no_rounding_are_exact(shape, weight_blocks):
    for product in products(KIND, shape, weight_blocks, signs):
        got = multiplied_on_gpu(product, torch.float32)
        assert torch.equal(got.cpu().double(), product.exact)
