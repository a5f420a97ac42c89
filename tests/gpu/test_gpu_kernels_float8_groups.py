"""Products of float8 codes over groups on a GPU, by either kernel, against their definition."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable

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
NAN = 0x7F
by_kernel = pytest.mark.parametrize("is_plain", [False, True], ids=["ours", "plain"])


def products(is_plain: bool) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The matmuls of this GPU, or those of one without kernels of its own for codes."""
    if not is_plain:
        return kernels.float8_grouped_mm, kernels.float8_grouped_mm_dw
    plain = importlib.import_module("backstash.kernels.float8_groups")
    return plain.mm_rows, plain.mm_columns


def turned(dy: Tensor, x: Tensor, ends_G: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    (dy_NP, padded_G), (x_KP, _) = (kernels.transpose_groups(one, ends_G) for one in (dy, x))
    return dy_NP, x_KP, padded_G


def codes_of(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    return (torch.randn(shape) * 8).to(dtype).cuda()


@pytest.mark.parametrize(
    ("is_plain", "features"),
    [
        *((False, features) for features in ((32, 48), (2048, 528), (16, 16), (20, 7))),
        *((True, features) for features in ((2048, 528), (20, 7))),
    ],
    ids=str,
)
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("code", [E4M3, E5M2], ids=str)
def test_grouped_products_are_their_definition(
    features: tuple[int, int], fast: bool, dtype: torch.dtype, code: torch.dtype, is_plain: bool
) -> None:
    (K, N), (mm_rows, mm_columns) = features, products(is_plain)
    for counts, tail in (*random_counts(5), ([300, 0, 129, 1, 128], 131)):
        G, T = len(counts), sum(counts) + tail
        if not T:
            continue
        ends_G = torch.tensor(counts).cumsum(0).int().cuda()
        x, dy, w = codes_of(T, K, dtype=code), codes_of(T, N, dtype=code), codes_of(G, N, K)
        for tensor in (x, dy):
            tensor.view(torch.uint8)[sum(counts) :] = NAN
        scale_T = torch.rand(T).cuda() / K
        scale_GN, scale_GK = torch.rand(G, N).cuda(), torch.rand(G, K).cuda()
        with no_host_reads():
            y = mm_rows(
                Scaled(x, scale_T), Scaled(w, scale_GN), ends_G, dtype, fast_accumulation=fast
            )
            dy_NP, x_KP, padded_G = turned(dy, x, ends_G)
            dw = mm_columns(Scaled(dy_NP, scale_GN), Scaled(x_KP, scale_GK), padded_G, dtype)
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


@by_kernel
def test_more_groups_than_rows_and_large_groups(is_plain: bool) -> None:
    counts = [0] * 500 + [1] * 20 + [0] * 500 + [3000]
    random.shuffle(counts)
    ends_G = torch.tensor(counts).cumsum(0).int().cuda()
    T, G, K, N = sum(counts), len(counts), 64, 32
    dy, x = codes_of(T, N), codes_of(T, K)
    dy_NP, x_KP, padded_G = turned(dy, x, ends_G)
    ones_GN, ones_GK = torch.ones(G, N).cuda(), torch.ones(G, K).cuda()
    pair = Scaled(dy_NP, ones_GN), Scaled(x_KP, ones_GK)
    found = products(is_plain)[1](*pair, padded_G, torch.bfloat16)
    g = counts.index(3000)
    rows = slice(int(ends_G[g]) - 3000, int(ends_G[g]))
    wanted = dy[rows].double().t() @ x[rows].double()
    assert_products(found[g], wanted, dy[rows].double().abs().t() @ x[rows].double().abs(), 3000)
    assert not found[torch.tensor(counts) == 0].any()


@by_kernel
def test_the_sums_of_gradients_are_added_in_float32(is_plain: bool) -> None:
    """Beside a product of 2^14 a unit cuts ones off, but only those of the same block of 128."""
    length = 4096
    ones = torch.ones(32, length).to(E4M3).cuda()
    large = ones.clone()
    large[:, 0] = 128
    wanted = 128.0 * 128 + length - 1
    ends_G = torch.tensor([32], dtype=torch.int32).cuda()
    mm_rows, mm_columns = products(is_plain)
    scale, scale_G = torch.ones(32).cuda(), torch.ones(1, 32).cuda()
    pair = Scaled(large, scale), Scaled(large.unsqueeze(0), scale_G)
    dx = mm_rows(*pair, ends_G, torch.float32, fast_accumulation=False)
    both = Scaled(large, scale_G), Scaled(large, scale_G)
    dw = mm_columns(*both, torch.tensor([length], dtype=torch.int32).cuda(), torch.float32)
    for found in (dx, dw):
        assert found.max() <= wanted
        assert found.min() >= wanted - 127


@by_kernel
def test_a_neighbours_codes_are_not_heard(is_plain: bool) -> None:
    counts = [30, 300, 50]
    ends_G = torch.tensor(counts).cumsum(0).int().cuda()
    T, K, N = sum(counts), 64, 272
    mm_rows, mm_columns = products(is_plain)
    x, dy, w = codes_of(T, K), codes_of(T, N), codes_of(3, N, K)
    scale_T, scale_GN, scale_GK = (torch.ones(n).cuda() for n in ((T,), (3, N), (3, K)))

    def both() -> tuple[Tensor, Tensor]:
        rows = Scaled(x, scale_T), Scaled(w, scale_GN)
        y = mm_rows(*rows, ends_G, torch.bfloat16, fast_accumulation=False)
        dy_NP, x_KP, padded_G = turned(dy, x, ends_G)
        columns = Scaled(dy_NP, scale_GN), Scaled(x_KP, scale_GK)
        return y, mm_columns(*columns, padded_G, torch.bfloat16)

    wanted = both()
    for g, rows in ((0, slice(0, 30)), (2, slice(330, 380))):
        for codes in (x[rows], dy[rows], w[g]):
            codes.view(torch.uint8).fill_(NAN)
    y, dw = both()
    assert torch.equal(y[30:330], wanted[0][30:330])
    assert torch.equal(dw[1], wanted[1][1])
    assert y[:30].isnan().all()
    assert dw[0].isnan().all()
    assert dw[2].isnan().all()


@by_kernel
def test_lines_of_a_weight_gradient_may_be_longer_than_32_bits_address_in_a_tile(
    is_plain: bool,
) -> None:
    P, lines = 2**24 + 2**20, 128
    codes = torch.zeros(lines, P, dtype=torch.uint8, device="cuda").view(E4M3)
    codes[:, -48:] = codes_of(lines, 48)
    padded_G = torch.tensor([16, P - 48, P], dtype=torch.int32).cuda()
    scale_G = torch.ones(3, lines).cuda()
    pair = Scaled(codes, scale_G), Scaled(codes, scale_G)
    found = products(is_plain)[1](*pair, padded_G, torch.float32)
    last = codes[:, -48:].double()
    assert not found[:2].any()
    assert_products(found[2], last @ last.t(), last.abs() @ last.abs().t(), 48)
