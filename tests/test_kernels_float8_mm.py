"""Products of float8 codes, and codes turned group by group with padding inside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backstash import kernels
from backstash.errors import DtypeError, ShapeError
from backstash.kernels import FLOAT8_UNIT, Scaled
from backstash.kernels.reference.float8_mm import padded_columns

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
K, N = 24, 10
#: Rows of each group and of the buffer.
SPLITS = {
    "awkward": ([5, 0, 31, 1], 40),
    "all-empty": ([0, 0, 0], 7),
    "no-rows": ([0, 0], 0),
    "whole-units": ([16, 32, 48], 96),
    "one-group": ([33], 33),
    "one-each": ([1] * 9, 9),
}
by_split = pytest.mark.parametrize(("counts", "rows"), SPLITS.values(), ids=SPLITS)


def codes_of(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    return torch.randn(shape).to(dtype)


def assert_rounded(found: Tensor, wanted: Tensor) -> None:
    """Added up in float32, rounded once."""
    sums = 64 * torch.finfo(torch.float32).eps
    eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, wanted.to(found.dtype), rtol=eps, atol=sums)


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).int()


@by_split
def test_turned_groups_begin_at_whole_units_and_end_with_zeros(
    counts: list[int], rows: int
) -> None:
    codes = torch.randint(1, 256, (rows, K), dtype=torch.uint8)
    turned, padded_G = kernels.transpose_groups(codes, ends_of(counts))
    assert turned.shape == (K, padded_columns(rows, len(counts)))
    assert turned.is_contiguous()
    assert turned.shape[1] % FLOAT8_UNIT == 0
    assert padded_G.dtype is torch.int32
    start = padded_start = 0
    for count, padded_end in zip(counts, padded_G.tolist(), strict=True):
        length = padded_end - padded_start
        assert length % FLOAT8_UNIT == 0
        assert max(count, 1) <= length < max(count, 1) + FLOAT8_UNIT
        group = turned[:, padded_start:padded_end]
        assert torch.equal(group[:, :count], codes[start : start + count].t())
        assert not group[:, count:].any()
        start, padded_start = start + count, padded_end
    assert padded_start <= turned.shape[1]


def test_more_rows_than_there_are_are_cut_and_the_dtype_is_kept() -> None:
    codes = codes_of(20, K, dtype=E5M2)
    turned, padded_G = kernels.transpose_groups(codes, torch.tensor([8, 50], dtype=torch.int32))
    assert turned.dtype is E5M2
    assert padded_G.tolist() == [16, 32]
    assert torch.equal(turned[:, 16:28].view(torch.uint8), codes[8:].t().view(torch.uint8))


@pytest.mark.parametrize("by_row", [False, True], ids=["tensor", "rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_dense_product_is_that_of_the_values(by_row: bool, dtype: torch.dtype) -> None:
    a, b, bias = codes_of(7, K), codes_of(N, K, dtype=E5M2), torch.randn(N).to(dtype)
    scales = torch.rand(7, 1), torch.rand(N, 1)
    if not by_row:
        scales = torch.rand(1), torch.rand(1)
    y = kernels.float8_mm(Scaled(a, scales[0]), Scaled(b, scales[1]), bias, dtype)
    values = (a.double() * scales[0]) @ (b.double() * scales[1]).t() + bias.double()
    assert y.dtype is dtype
    assert_rounded(y, values)


@by_split
def test_grouped_products_are_those_of_the_values(counts: list[int], rows: int) -> None:
    G, ends_G = len(counts), ends_of(counts)
    x, dy, w = codes_of(rows, K), codes_of(rows, N), codes_of(G, N, K)
    scale_T, scale_GN, scale_GK = torch.rand(rows), torch.rand(G, N), torch.rand(G, K)
    y = kernels.float8_grouped_mm(Scaled(x, scale_T), Scaled(w, scale_GN), ends_G, torch.bfloat16)
    dy_NP, padded_G = kernels.transpose_groups(dy, ends_G)
    x_KP, _ = kernels.transpose_groups(x, ends_G)
    pair = Scaled(dy_NP, scale_GN), Scaled(x_KP, scale_GK)
    dw = kernels.float8_grouped_mm_dw(*pair, padded_G, torch.bfloat16)
    assert y.dtype is dw.dtype is torch.bfloat16
    start = 0
    for g, end in enumerate(ends_G.tolist()):
        x_g, dy_g = x[start:end].double(), dy[start:end].double()
        w_g = w[g].double() * scale_GN[g].unsqueeze(1)
        wanted = (x_g * scale_T[start:end].unsqueeze(1)) @ w_g.t()
        assert_rounded(y[start:end], wanted)
        wanted = (dy_g * scale_GN[g]).t() @ (x_g * scale_GK[g])
        assert_rounded(dw[g], wanted)
        start = end
    assert not y[start:].any()


@by_split
def test_a_product_of_gathered_codes_is_that_of_copies(counts: list[int], rows: int) -> None:
    a, w = codes_of(12, K), codes_of(len(counts), N, K)
    scale_T, scale_GN = torch.rand(12), torch.rand(len(counts), N)
    source_R = torch.arange(rows) % 12
    weight, last = Scaled(w, scale_GN), (ends_of(counts), torch.bfloat16)
    copies = Scaled(a.float()[source_R].to(E4M3), scale_T[source_R])
    wanted = kernels.float8_grouped_mm(copies, weight, *last)
    for source in (source_R, source_R.int()):
        found = kernels.float8_gathered_mm(Scaled(a, scale_T), weight, last[0], source, last[1])
        assert torch.equal(found, wanted)


def test_sources_that_are_no_row_numbers_are_refused() -> None:
    a, w = Scaled(codes_of(3, K), torch.rand(3)), Scaled(codes_of(1, N, K), torch.rand(1, N))
    with pytest.raises(DtypeError, match="cast them with"):
        kernels.float8_gathered_mm(a, w, ends_of([3]), torch.rand(3), torch.float32)
    with pytest.raises(ShapeError, match="sort_by_expert"):
        kernels.float8_gathered_mm(a, w, ends_of([3]), torch.zeros(3, 1).long(), torch.float32)
