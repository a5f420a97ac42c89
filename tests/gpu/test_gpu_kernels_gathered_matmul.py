"""Where copies of tokens are made first on a GPU, the products are those of copies as well."""

from __future__ import annotations

import pytest
import torch

from backstash import kernels
from gathered_cases import PRODUCTS, of_copies, operands

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("sizes", [(31, 40, 24), (9, 6, 10), (9, 0, 16), (1, 72, 72)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sizes_and_dtypes_that_are_not_read_in_place_work(name, sizes, dtype):
    both, at, ends, source = operands(name, [7, 0, 90], sizes=sizes, dtype=dtype, device="cuda")
    got = getattr(kernels, name)(*both, ends, source)
    assert torch.equal(got, of_copies(name, both, at, ends, source))


@pytest.mark.parametrize("name", PRODUCTS)
def test_tokens_that_lie_apart_are_read_where_they_are(name):
    both, at, ends, source = operands(
        name, [7, 0, 90], sizes=(40, 64, 64), dtype=torch.bfloat16, device="cuda"
    )
    wanted = of_copies(name, both, at, ends, source)
    for room in (torch.empty(40, 128), torch.empty(40, 72), torch.empty(40, 65)):
        apart = room.to(both[at])[:, : both[at].shape[1]].copy_(both[at])
        moved = [apart if i == at else x for i, x in enumerate(both)]
        assert torch.equal(getattr(kernels, name)(*moved, ends, source), wanted)
