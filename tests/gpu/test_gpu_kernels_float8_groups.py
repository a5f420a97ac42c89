"""Products of float8 codes over groups on a GPU, torch's and our own, against their definition."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from backstash import kernels
from backstash.kernels import Scaled
from host_reads import no_host_reads
from product_cases import assert_products
from twin_cases import random_counts

pytestmark = pytest.mark.gpu
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def codes_of(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    return (torch.randn(shape) * 8).to(dtype).cuda()


@pytest.mark.parametrize("features", [(32, 48), (2048, 528), (16, 16)], ids=str)
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("code", [E4M3, E5M2], ids=str)
def test_grouped_products_are_their_definition(
    features: tuple[int, int], fast: bool, dtype: torch.dtype, code: torch.dtype
) -> None:
    """Torch takes bfloat16 and E4M3; the others are our own kernels."""
    K, N = features
    for counts, tail in random_counts(6):
        G, T = len(counts), sum(counts) + tail
        if not T:
            continue
        ends_G = torch.tensor(counts).cumsum(0).int().cuda()
        x, dy, w = codes_of(T, K, dtype=code), codes_of(T, N, dtype=code), codes_of(G, N, K)
        for tensor in (x, dy):
            tensor.view(torch.uint8)[sum(counts) :] = 0x7F
        scale_T = torch.rand(T).cuda() / K
        scale_GN, scale_GK = torch.rand(G, N).cuda(), torch.rand(G, K).cuda()
        with no_host_reads():
            y = kernels.float8_grouped_mm(
                Scaled(x, scale_T), Scaled(w, scale_GN), ends_G, dtype, fast_accumulation=fast
            )
            dy_NP, padded_G = kernels.transpose_groups(dy, ends_G)
            x_KP, _ = kernels.transpose_groups(x, ends_G)
            dw = kernels.float8_grouped_mm_dw(
                Scaled(dy_NP, scale_GN), Scaled(x_KP, scale_GK), padded_G, dtype
            )
        assert not y[sum(counts) :].any()
        start = 0
        for g, end in enumerate(ends_G.tolist()):
            rows = slice(start, end)
            x_g, dy_g = x[rows].double(), dy[rows].double()
            w_g = w[g].double() * scale_GN[g].unsqueeze(1)
            x_scaled = x_g * scale_T[rows].unsqueeze(1)
            assert_products(y[rows], x_scaled @ w_g.t(), x_scaled.abs() @ w_g.abs().t(), K)
            left, right = (dy_g * scale_GN[g]).t(), x_g * scale_GK[g]
            assert_products(dw[g], left @ right, left.abs() @ right.abs(), end - start)
            start = end
        assert not dw[torch.tensor(counts) == 0].any()


def test_more_groups_than_rows_and_large_groups() -> None:
    counts = [0] * 500 + [1] * 20 + [0] * 500 + [3000]
    random.shuffle(counts)
    ends_G = torch.tensor(counts).cumsum(0).int().cuda()
    T, G, K, N = sum(counts), len(counts), 64, 32
    dy, x = codes_of(T, N), codes_of(T, K)
    (dy_NP, padded_G), (x_KP, _) = (kernels.transpose_groups(one, ends_G) for one in (dy, x))
    ones_GN, ones_GK = torch.ones(G, N).cuda(), torch.ones(G, K).cuda()
    pair = Scaled(dy_NP, ones_GN), Scaled(x_KP, ones_GK)
    found = kernels.float8_grouped_mm_dw(*pair, padded_G, torch.bfloat16)
    g = counts.index(3000)
    rows = slice(int(ends_G[g]) - 3000, int(ends_G[g]))
    wanted = dy[rows].double().t() @ x[rows].double()
    assert_products(found[g], wanted, dy[rows].double().abs().t() @ x[rows].double().abs(), 3000)
    assert not found[torch.tensor(counts) == 0].any()
