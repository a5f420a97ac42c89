"""The gradient of a weight from copies of tokens on a Hopper GPU: every bit that of copies."""

from __future__ import annotations

import pytest
import torch

from backstash import kernels
from gathered_cases import PRODUCTS, by_half, by_many, check_bits, operands

pytestmark = pytest.mark.gpu
NAN = float("nan")


@pytest.mark.parametrize("name", PRODUCTS[2:])
@by_many
@pytest.mark.parametrize("sizes", [(50, 64, 128), (700, 208, 80), (50, 2048, 768)], ids=str)
@by_half
def test_every_bit_is_that_of_the_product_of_copies(name, counts, sizes, dtype):
    check_bits(name, counts, sizes, dtype)


@pytest.mark.parametrize("name", PRODUCTS[2:])
def test_what_is_no_number_stays_in_its_group(name):
    counts = [30, 100, 50]
    both, at, ends, source = operands(name, counts, sizes=(90, 64, 128), device="cuda")
    both = [x.bfloat16() for x in both]
    source[:30], source[30:130], source[130:] = source[:30] % 30, 30 + source[30:130] % 30, 89
    wanted = getattr(kernels, name)(*both, ends, source)
    both[at][:30], both[1 - at][130:] = NAN, NAN
    both[at][89] = float("inf")
    got = getattr(kernels, name)(*both, ends, source)
    assert torch.equal(got[1], wanted[1])
    assert got[0].isnan().all()
    assert got[2].isnan().all()
