"""Copies of tokens times their group's weight on a Hopper GPU: every bit that of copies."""

from __future__ import annotations

import pytest
import torch

from backstash import kernels
from backstash.kernels import Scaled
from gathered_cases import PRODUCTS, by_half, by_many, check_bits, operands
from host_reads import no_host_reads

pytestmark = pytest.mark.gpu
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("name", PRODUCTS[:2])
@by_many
@pytest.mark.parametrize("sizes", [(50, 64, 128), (700, 192, 64), (50, 2048, 768)], ids=str)
@by_half
def test_every_bit_is_that_of_the_product_of_copies(name, counts, sizes, dtype):
    check_bits(name, counts, sizes, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "exact"])
@by_many
@pytest.mark.parametrize("sizes", [(50, 128, 128), (700, 384, 64), (50, 2048, 768)], ids=str)
def test_codes_give_every_bit_of_the_product_of_copies(counts, sizes, fast, dtype):
    given = {"sizes": sizes, "dtype": torch.bfloat16, "device": "cuda"}
    (x, w), _, ends, source = operands("gathered_mm", counts, tail=37, **given)
    tokens, scale_inv = kernels.quantize_float8_rows(x, E4M3)
    rows = Scaled(tokens.view(E4M3), scale_inv.flatten())
    codes, scale_inv = kernels.quantize_float8_rows(w.flatten(0, 1), E5M2)
    weight = Scaled(codes.view(E5M2).view(w.shape), scale_inv.view(w.shape[:2]))
    copies = Scaled(rows.codes.view(torch.uint8)[source].view(E4M3), rows.scale_inv[source])
    last = {"fast_accumulation": fast}
    wanted = kernels.float8_grouped_mm(copies, weight, ends, dtype, **last)
    given, sources = (
        (rows, weight, ends),
        [source.to(index) for index in (torch.int64, torch.int32)],
    )
    with no_host_reads():
        found = [kernels.float8_gathered_mm(*given, at, dtype, **last) for at in sources]
    assert all(torch.equal(one, wanted) for one in found)
