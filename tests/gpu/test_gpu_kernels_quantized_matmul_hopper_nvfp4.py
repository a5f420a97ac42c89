"""Products of rows on NVFP4 codes on a Hopper GPU, where bytes of rows are whole units."""

import pytest
import torch

from backstash.kernels import quantized_matmul
from quantized_mm_cases import (
    KINDS,
    assert_product,
    by_tiles,
    launches,
    multiplied_on_gpu,
    nvfp4_sum,
    on_hopper,
    products,
)

pytestmark = [pytest.mark.gpu, on_hopper]
SHAPES = {
    "one-matrix": (300, (64, 96)),
    "empty-one-and-33": ([0, 1, 33], (64, 96)),
    "half-a-step": ([700, 3, 400], (288, 416)),
    "many-tiles": ([1000, 2000, 0, 77, 1], (512, 768)),
}


@by_tiles
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-row-scaled"])
def test_products_are_those_of_the_dequantized_values(name, shape, weight_blocks, monkeypatch):
    launched = launches(monkeypatch, quantized_matmul, "hopper_nvfp4_kernel")
    for product in products(KINDS[name], shape, weight_blocks)[:2]:
        for dtype in (torch.bfloat16, torch.float32):
            assert_product(multiplied_on_gpu(product, dtype), product, nvfp4_sum(product.terms))
    assert len(launched) == 4
