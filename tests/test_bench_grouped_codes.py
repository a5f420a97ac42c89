"""The benchmark of products on codes compares the same products, whatever multiplies them."""

from __future__ import annotations

import torch
from torch import Tensor

from backstash.bench import grouped_codes, grouped_mm

SIZE = (96, 32, 48, 4)


def test_every_product_of_every_format_is_compared_with_decoding_and_with_bfloat16() -> None:
    works = list(grouped_codes.works(SIZE, grouped_mm.group_ends(SIZE[0], SIZE[3], "skewed")))
    assert [work.what for work in works] == [
        f"{format} {product}, codes beside {other}"
        for format in grouped_codes.FORMATS
        for product in ("forward", "gradient of rows", "gradient of weights")
        for other in ("decoded", "bfloat16")
    ]


def test_both_sides_multiply_the_same() -> None:
    ends_G = grouped_mm.group_ends(SIZE[0], SIZE[3], "skewed")
    for work in grouped_codes.works(SIZE, ends_G):
        ours, theirs = work.ours(), work.theirs()
        assert isinstance(ours, Tensor)
        assert isinstance(theirs, Tensor)
        assert ours.dtype is theirs.dtype is torch.bfloat16
        grouped_mm.check_outputs(work.what, ours, theirs, work.tolerance)
