"""How a Triton twin is compared with its reference, and splits of rows to try it on."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor


def assert_twin_bytes(got: Tensor, wanted: Tensor) -> None:
    """Every bit, the sign of a zero too; a NaN has to be a NaN, with any payload."""
    got, wanted = got.cpu(), wanted.cpu()
    assert got.dtype is wanted.dtype
    assert got.shape == wanted.shape
    assert got.is_contiguous()
    if got.dtype.is_floating_point:
        assert torch.equal(got.isnan(), wanted.isnan())
        assert torch.equal(got.nan_to_num(0), wanted.nan_to_num(0))
        signs = wanted.isnan().logical_not()
        assert torch.equal(got.signbit()[signs], wanted.signbit()[signs])
    else:
        different = (got != wanted).nonzero()
        assert not len(different), f"{len(different)} differ, the first at {different[0].tolist()}"


def random_counts(times: int) -> Iterator[tuple[list[int], int]]:
    """Rows of each group and of the tail: few and many groups, empty ones among them."""
    for _ in range(times):
        groups = random.choice([1, 2, 3, 8, 17, 64])
        most = random.choice([1, 31, 33, 80])
        yield (
            [random.choice([0, random.randint(0, most)]) for _ in range(groups)],
            random.choice([0, 1, 40]),
        )
