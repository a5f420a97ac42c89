"""Products of float8 codes on a GPU against their definition, and padded groups byte for byte."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from backstash import kernels
from backstash.kernels import Scaled
from backstash.kernels.reference import float8_mm as reference
from host_reads import no_host_reads
from product_cases import rounding
from twin_cases import assert_twin_bytes, random_counts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="torch multiplies groups of float8 on Hopper",
    ),
]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def codes_of(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    return (torch.randn(shape) * 8).to(dtype).cuda()


def assert_products(found: Tensor, wanted: Tensor, sizes: Tensor, terms: int) -> None:
    limit = rounding(found.dtype, terms) * sizes.double() + 1e-30
    assert found.shape == wanted.shape
    worst = ((found.double() - wanted.double()).abs() / limit).max() if len(found) else 0
    assert worst <= 1, f"off by {worst:.2f} of what rounding explains"


@pytest.mark.parametrize("columns", [1, 16, 33, 200])
def test_padded_groups_are_the_references(columns: int) -> None:
    for counts, tail in random_counts(40):
        rows = sum(counts) + tail
        ends_G = torch.tensor(counts).cumsum(0).int()
        codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
        wanted, wanted_ends = kernels.transpose_groups(codes, ends_G)
        with no_host_reads():
            found, found_ends = kernels.transpose_groups(
                codes.cuda(non_blocking=True), ends_G.cuda(non_blocking=True)
            )
        assert_twin_bytes(found_ends, wanted_ends)
        end = int(wanted_ends[-1])
        assert found.shape == wanted.shape
        assert torch.equal(found[:, :end].cpu(), wanted[:, :end])


def test_padded_groups_of_a_slice_with_ends_past_the_rows() -> None:
    codes = torch.randint(0, 256, (300, 96), dtype=torch.uint8)[7:, 3:83]
    ends_G = torch.tensor([100, 100, 900])
    wanted, wanted_ends = kernels.transpose_groups(codes, ends_G)
    found, found_ends = kernels.transpose_groups(codes.cuda(), ends_G.cuda())
    assert_twin_bytes(found_ends, wanted_ends)
    assert torch.equal(found[:, : int(wanted_ends[-1])].cpu(), wanted[:, : int(wanted_ends[-1])])


@pytest.mark.parametrize("shape", [(64, 32, 48), (1, 16, 16), (37, 80, 16), (300, 2048, 528)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("codes", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=str)
@pytest.mark.parametrize("fast", [False, True])
def test_a_dense_product_is_its_definition(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    codes: tuple[torch.dtype, torch.dtype],
    fast: bool,
) -> None:
    M, J, C = shape
    a, b = codes_of(M, J, dtype=codes[0]), codes_of(C, J, dtype=codes[1])
    kinds = [(torch.rand(1), torch.rand(1))]
    if codes == (E4M3, E4M3):
        kinds += [(torch.rand(M, 1), torch.rand(C, 1)), (torch.rand(M, 1), torch.rand(1))]
    for scales in kinds:
        left, right = Scaled(a, scales[0].cuda() / J), Scaled(b, scales[1].cuda() / 64)
        sizes = [Scaled(one.codes.float().abs(), one.scale_inv) for one in (left, right)]
        for bias in (None, torch.randn(C).to("cuda", dtype)):
            found = kernels.float8_mm(left, right, bias, dtype, fast_accumulation=fast)
            assert found.dtype is dtype
            wanted = reference.float8_mm(left, right, bias, torch.float64)
            size_of_bias = None if bias is None else bias.abs()
            size = reference.float8_mm(sizes[0], sizes[1], size_of_bias, torch.float64)
            assert_products(found, wanted, size, J)


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
