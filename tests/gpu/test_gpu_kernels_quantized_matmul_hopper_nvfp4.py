"""Products of rows on NVFP4 codes on a Hopper GPU, where bytes of rows are whole units."""

import pytest

from backstash.kernels import quantized_matmul
from quantized_mm_cases import by_tiles, check_products, launches, on_hopper

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
    check_products(name, shape, weight_blocks, count=2)
    assert len(launched) == 4
