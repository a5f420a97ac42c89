"""Products on MXFP8 codes on a Hopper GPU, where the rows of codes are whole units."""

import pytest
import torch

from backstash.kernels import quantized_matmul
from quantized_mm_cases import (
    KINDS,
    assert_product,
    bfloat16_sum,
    by_tiles,
    by_whole_shape,
    launches,
    multiplied_on_gpu,
    on_hopper,
    products,
    signs,
)

pytestmark = [pytest.mark.gpu, on_hopper]
NAMES = ["mxfp8"]
by_kind = pytest.mark.parametrize("kind", [KINDS[name] for name in NAMES], ids=NAMES)


@by_tiles
@by_whole_shape
@by_kind
def test_products_are_those_of_the_dequantized_values(kind, shape, weight_blocks, monkeypatch):
    launched = launches(monkeypatch, quantized_matmul, "hopper_mx_kernel")
    for product in products(kind, shape, weight_blocks):
        for dtype in (torch.bfloat16, torch.float32):
            assert_product(multiplied_on_gpu(product, dtype), product, bfloat16_sum(product.terms))
    assert len(launched) == 6


@by_tiles
@by_whole_shape
def test_sums_that_need_no_rounding_are_exact(shape, weight_blocks):
    for product in products(KINDS["mxfp8"], shape, weight_blocks, signs):
        got = multiplied_on_gpu(product, torch.float32)
        assert torch.equal(got.cpu().double(), product.exact)
