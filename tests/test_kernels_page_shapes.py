"""A launch is cut into parts that lie within pages, for no more programs than there are parts."""

from __future__ import annotations

import pytest
import torch

from backstash.errors import LayoutError
from backstash.kernels.reference.pages import MOST_BUFFERS

page_shapes = pytest.importorskip("backstash.kernels.page_shapes")

KINDS = {
    "one small": [(torch.uint8, 100, True)],
    "one large": [(torch.uint8, 1 << 30, True)],
    "an odd address": [(torch.uint8, 1 << 22, False)],
    "many": [(torch.uint8, 3 << count, True) for count in range(14, 22)],
    "values": [(torch.bfloat16, 1 << 22, True)],
    "both": [(torch.bfloat16, 1 << 22, True), (torch.uint8, 1 << 20, True)],
}


def shape_of(kinds: list[tuple[torch.dtype, int, bool]], page_bytes: int, *, leaving: bool = False):
    return page_shapes._shape_of(tuple(kinds), page_bytes, 132, leaving=leaving)


@pytest.mark.parametrize("page_bytes", [64, 4096, 65536, 1 << 20])
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_parts_fill_a_page_and_programs_have_one_each(kinds, page_bytes: int) -> None:
    shape = shape_of(kinds, page_bytes)
    parts = 0
    for (_, count, _), part, payload in zip(kinds, shape.parts, shape.payloads, strict=True):
        assert payload % part == 0
        parts += -(-count // part)
    assert shape.programs == min(parts, 132 * shape.footprint.programs)


def test_vectors_need_all_addresses_and_a_warp_has_one_for_each_thread() -> None:
    aligned, odd = (torch.uint8, 1 << 30, True), (torch.uint8, 1 << 30, False)
    shapes = [shape_of(kinds, 65536) for kinds in ([aligned, aligned], [aligned, odd])]
    assert [shape.in_words for shape in shapes] == [True, False]
    least = shapes[1].footprint.warps * 32 * 16
    assert shapes[1].parts == (least, least)
    assert min(shapes[0].parts) >= least


def test_only_whole_pages_of_large_buffers_of_bytes_are_left() -> None:
    kinds = [
        (torch.uint8, 1 << 22, True),
        (torch.uint8, 1 << 22, False),
        (torch.uint8, 1000, True),
        (torch.bfloat16, 1 << 22, True),
    ]
    assert shape_of(kinds, 65536, leaving=True).left == (65536, 0, 0, 0)
    assert shape_of(kinds, 65536).left == (0, 0, 0, 0)
    assert shape_of(kinds, 4096, leaving=True).left == (0, 0, 0, 0)


def test_the_same_buffers_are_thought_of_once() -> None:
    buffers = [torch.empty(1000, dtype=torch.uint8) for _ in range(2)]
    shapes = [page_shapes.LaunchShape.of([b], 4096, leaving=False) for b in buffers]
    assert shapes[0] is shapes[1]


@pytest.mark.parametrize("count", [0, MOST_BUFFERS + 1])
def test_a_launch_has_a_few_buffers(count: int) -> None:
    with pytest.raises(LayoutError, match="split"):
        page_shapes.LaunchShape.of([torch.empty(8, dtype=torch.uint8)] * count, 64, leaving=False)
