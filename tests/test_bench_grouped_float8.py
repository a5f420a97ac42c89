"""The benchmark of float8 rows compares the same products, whatever multiplies them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from backstash.bench import grouped_float8, grouped_mm

SIZE = (96, 32, 48, 4)


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> list[grouped_float8.Work]:
    """On a CPU torch multiplies no float8 groups: its matmuls are replaced by their meaning."""

    def grouped(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        ends = [0, *offs.tolist()]
        spans = list(itertools.pairwise(ends))
        if b.ndim == 2:
            return torch.stack([a[:, start:end] @ b[start:end] for start, end in spans])
        return torch.cat([a[start:end] @ b[g] for g, (start, end) in enumerate(spans)])

    def scaled(
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        _a: object,
        scale_b: Tensor,
        _b: object,
        **rest: object,
    ) -> Tensor:
        offs: Any = rest["offs"]
        if b.ndim == 2:
            scale_GN, scale_GK = (scale.view(len(offs), -1) for scale in (scale_a, scale_b))
            sums_GNK = grouped(a.float(), b.float(), offs)
            return (sums_GNK * scale_GN.unsqueeze(2) * scale_GK.unsqueeze(1)).bfloat16()
        values = a.float() * scale_a.unsqueeze(1), b.float() * scale_b.unsqueeze(1)
        return grouped(*values, offs=offs).bfloat16()

    monkeypatch.setattr(grouped_float8.F, "grouped_mm", grouped)
    monkeypatch.setattr(grouped_float8.F, "scaled_grouped_mm", scaled)
    ends_G = grouped_mm.group_ends(SIZE[0], SIZE[3], "skewed")
    return list(grouped_float8.works(SIZE, ends_G))


def test_every_product_is_compared_with_torchs_and_with_bfloat16(
    works: list[grouped_float8.Work],
) -> None:
    beside = ["codes beside bfloat16", "quantized beside bfloat16"]
    assert [work.what for work in works] == [
        *(f"forward, {how}" for how in ["codes", *beside]),
        *(f"gradient of rows, {how}" for how in ["codes", "codes in order", *beside]),
        *(f"gradient of weights, {how}" for how in ["codes", "codes in order", *beside]),
        "both gradients, quantized beside bfloat16",
    ]


def test_torchs_speed_is_wanted_as_of_plain_values(works: list[grouped_float8.Work]) -> None:
    for work in works:
        assert (work.target is None) is ("beside" not in work.what)


def test_both_sides_multiply_the_same(works: list[grouped_float8.Work]) -> None:
    for work in works:
        grouped_mm.check_outputs(work.what, work.ours(), work.theirs(), work.tolerance)
