"""Products of float8 codes on a GPU against their definition, and padded groups byte for byte."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backstash import kernels
from backstash.kernels import Scaled
from backstash.kernels.reference import float8_mm as reference
from host_reads import no_host_reads
from product_cases import assert_products
from twin_cases import assert_twin_bytes, random_counts

pytestmark = pytest.mark.gpu
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def codes_of(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    return (torch.randn(shape) * 8).to(dtype).cuda()


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
