"""Which bytes each block of rows stores on its way to a group's columns, as the table says it."""

import pytest
import torch

from backstash import kernels
from twin_cases import random_counts

pytestmark = pytest.mark.gpu


def stored(parts: int, place: int) -> list[int]:
    """The bytes that a block whose bytes begin at ``place`` stores, by its parts."""
    skipped = -place % 4
    parts, first = parts >> 8 * skipped, place + skipped
    end = first + 4 * (parts & 1)
    spans = [
        range(first, first + 4), range(first + 4, first + 8), range(place, place + 1),
        range(first - 2, first), range(first - 2, first - 1),
        range(end, end + 2), range(end, end + 1), range(end + 2, end + 3),
    ]  # fmt: skip
    return [byte for bit, span in enumerate(spans) if parts >> bit & 1 for byte in span]


def check_parts(counts, tail):
    """Every byte of the buffer is stored once, whatever lies around it."""
    from backstash.kernels.nvfp4_places import column_table

    rows, ends, columns = sum(counts) + tail, torch.tensor(counts).cumsum(0).int(), 5
    table = column_table(ends.cuda(), rows, 2)
    assert table is not None
    size = kernels.nvfp4_column_bytes(rows, columns, len(counts), 2)
    for base in range(4):
        found = []
        for _, _, _, before_group, width, before, parts, _ in table.tolist():
            for column in range(columns):
                place = base + before_group * columns + before + column * width
                found += stored(parts % 2**32, place)
        assert sorted(found) == list(range(base, base + size))


def test_every_byte_is_stored_once():
    for counts, tail in [([33, 0, 64, 1, 95], 7), *random_counts(30)]:
        check_parts(counts, tail)


def test_groups_of_whole_blocks_are_known_to_lie_at_multiples_of_eight():
    from backstash.kernels.nvfp4_places import column_table

    for counts, tail, uneven in (
        ([32, 0, 96], 0, False),
        ([32, 16, 80], 48, False),
        ([32, 8, 88], 0, True),
    ):
        ends = torch.tensor(counts).cumsum(0).int().cuda()
        table = column_table(ends, sum(counts) + tail, 2)
        assert table is not None
        blocks = kernels.block_ends(ends, sum(counts) + tail, 16)[-1]
        assert ((table[:blocks, 7] != 0) == uneven).all()
