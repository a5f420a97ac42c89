"""Products of rows that are copies of tokens are those of the copies."""

from __future__ import annotations

import pytest
import torch

from backstash import kernels
from backstash.errors import DtypeError, ShapeError
from gathered_cases import PRODUCTS, of_copies, operands

COUNTS = [[4, 0, 11], [0, 0, 0], [20, 0, 1]]


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_they_are_the_products_of_copies(name, counts, dtype):
    both, at, ends, source = operands(name, counts, dtype=dtype)
    got = getattr(kernels, name)(*both, ends, source)
    assert torch.equal(got, of_copies(name, both, at, ends, source))


@pytest.mark.parametrize("name", PRODUCTS)
def test_sources_that_are_no_row_numbers_are_refused(name):
    both, _, ends, source = operands(name, COUNTS[0])
    with pytest.raises(ShapeError, match=r"sources \(R,\)"):
        getattr(kernels, name)(*both, ends, source.view(1, -1))
    with pytest.raises(DtypeError, match="int32 or int64"):
        getattr(kernels, name)(*both, ends, source.float())


@pytest.mark.parametrize("name", PRODUCTS)
def test_no_rows_and_no_tokens_give_zeros(name):
    both, _, ends, source = operands(name, [0, 0], tail=0, sizes=(0, 64, 64))
    assert not getattr(kernels, name)(*both, ends, source).any()
