"""Products of rows that are copies of tokens: their operands, and what they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from backstash import kernels
from host_reads import no_host_reads

T, K, N = 9, 6, 10
PRODUCTS = [
    "gathered_mm",
    "gathered_mm_dx",
    "gathered_mm_dw_of_input",
    "gathered_mm_dw_of_output",
]
MANY = [
    [30, 0, 100, 1, 63, 64, 65, 127, 128, 129],
    [0] * 4,
    [1500, 0, 0],
    [7, 300, 2000, 0, 64, 640],
]
by_many = pytest.mark.parametrize("counts", MANY, ids=["many", "none", "one", "mixed"])
by_half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def operands(
    name: str, counts: list[int], *, tail: int = 3, sizes: Any = (T, K, N), **new: Any
) -> tuple[list[Tensor], int, Tensor, Tensor]:
    """The two operands of a product, which of them are tokens, ends, and sources."""
    tokens, k, n = sizes
    groups, rows = len(counts), sum(counts) + tail
    device = new.get("device")
    source = torch.randint(0, max(tokens, 1), (rows,), device=device)
    ends = torch.tensor(counts, device=device).cumsum(0).int()
    given = torch.randn(tokens, n if name.endswith(("dx", "output")) else k, **new)
    if name in ("gathered_mm", "gathered_mm_dx"):
        return [given, torch.randn(groups, n, k, **new)], 0, ends, source
    if name.endswith("input"):
        return [torch.randn(rows, n, **new), given], 1, ends, source
    return [given, torch.randn(rows, k, **new)], 0, ends, source


def of_copies(name: str, both: list[Tensor], at: int, ends: Tensor, source: Tensor) -> Tensor:
    """The product, with the copies made."""
    both = [kernels.permute(x, source) if i == at else x for i, x in enumerate(both)]
    plain = "grouped_mm_dw" if "dw" in name else name.replace("gathered", "grouped")
    return getattr(kernels, plain)(*both, ends)


def check_bits(name: str, counts: list[int], sizes: Any, dtype: torch.dtype) -> None:
    """On a GPU the product has the bits of that of copies, each time and without a host read."""
    both, at, ends, source = operands(
        name, counts, tail=37, sizes=sizes, dtype=dtype, device="cuda"
    )
    wanted = of_copies(name, both, at, ends, source)
    for index in (torch.int64, torch.int32):
        assert torch.equal(getattr(kernels, name)(*both, ends, source.to(index)), wanted)
    with no_host_reads():
        again = [getattr(kernels, name)(*both, ends, source) for _ in range(3)]
    assert all(torch.equal(one, wanted) for one in again)
