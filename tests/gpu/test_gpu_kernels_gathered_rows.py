"""Copies of tokens times their group's weight on a Hopper GPU: every bit that of copies."""

from __future__ import annotations

import pytest
import torch

from backstash import kernels
from gathered_cases import PRODUCTS, by_half, by_many, of_copies, operands
from host_reads import no_host_reads

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", PRODUCTS[:2])
@by_many
@pytest.mark.parametrize("sizes", [(50, 64, 128), (700, 192, 64), (50, 2048, 768)], ids=str)
@by_half
def test_every_bit_is_that_of_the_product_of_copies(name, counts, sizes, dtype):
    both, at, ends, source = operands(
        name, counts, tail=37, sizes=sizes, dtype=dtype, device="cuda"
    )
    wanted = of_copies(name, both, at, ends, source)
    for index in (torch.int64, torch.int32):
        assert torch.equal(getattr(kernels, name)(*both, ends, source.to(index)), wanted)
    with no_host_reads():
        again = [getattr(kernels, name)(*both, ends, source) for _ in range(3)]
    assert all(torch.equal(one, wanted) for one in again)
