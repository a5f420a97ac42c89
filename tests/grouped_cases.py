"""Splits of rows that grouped products get wrong, and what the products should be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

# Around the 64 and 128 rows of a tile, empty groups at every place, one group with everything.
SPLITS = {
    "around-a-tile": [127, 128, 129, 1, 63, 64, 65, 0],
    "empty-first-and-between": [0, 0, 300, 0, 7, 0],
    "one-has-everything": [0, 1000, 0],
    "one-row-each": [1] * 9,
    "all-empty": [0, 0, 0],
    "one-group": [77],
    "skewed": [700, 3, 0, 90, 11, 260, 2, 1],
}
by_split = pytest.mark.parametrize("counts", SPLITS.values(), ids=SPLITS.keys())
by_half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def operands(
    counts: list[int], k: int, n: int, dtype: torch.dtype, tail: int = 70
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, the gradient of their products, weights and ends on the GPU; the tail is NaN."""
    rows = sum(counts)
    x = torch.randn(rows + tail, k, device="cuda").to(dtype)
    dy = torch.randn(rows + tail, n, device="cuda").to(dtype)
    w = torch.randn(len(counts), n, k, device="cuda").to(dtype)
    x[rows:] = dy[rows:] = float("nan")
    return x, dy, w, torch.tensor(counts).cumsum(0).int().cuda()


def defined(counts: list[int], x: Tensor, dy: Tensor, w: Tensor) -> list[Tensor]:
    """y, dx and dw by their definition, a group at a time, in float64."""
    y, dx = (torch.zeros(value.shape, dtype=torch.float64, device=x.device) for value in (dy, x))
    dw = torch.zeros(w.shape, dtype=torch.float64, device=x.device)
    start = 0
    for g, count in enumerate(counts):
        rows = slice(start, start + count)
        y[rows] = x[rows].double() @ w[g].double().t()
        dx[rows] = dy[rows].double() @ w[g].double()
        dw[g] = dy[rows].double().t() @ x[rows].double()
        start += count
    return [y, dx, dw]


def assert_rounded(got: Tensor, wanted: Tensor, terms: int) -> None:
    """Within one rounding to the dtype of a float32 sum of ``terms`` products."""
    single = torch.finfo(torch.float32).eps
    scale = wanted.abs().max().item() if wanted.numel() else 0.0
    torch.testing.assert_close(
        got.double(), wanted, rtol=torch.finfo(got.dtype).eps, atol=single * max(terms, 1) * scale
    )
