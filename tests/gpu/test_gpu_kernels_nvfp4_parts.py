"""Which bytes each block of rows stores on its way to a group's columns, as the table says it."""

import pytest
import torch

from backstash import kernels
from twin_cases import random_counts

pytestmark = pytest.mark.gpu


def stored(parts, place):
    """All bytes that blocks whose bytes begin at places store, by their parts; flat."""
    skipped = -place % 4
    parts, first = parts >> 8 * skipped, place + skipped
    end = first + 4 * (parts & 1)
    # Where the bytes of each of the eight parts begin, and how many there are.
    starts = [first, first + 4, place, first - 2, first - 2, end, end, end + 2]
    sizes = [4, 4, 1, 2, 1, 2, 1, 1]
    found = [
        (start + byte)[(parts >> bit & 1).bool()]
        for bit, (start, size) in enumerate(zip(starts, sizes, strict=True))
        for byte in range(size)
    ]
    return torch.cat(found)


def check_parts(counts, tail):
    """Every byte of the buffer is stored once, whatever lies around it."""
    from backstash.kernels.nvfp4_places import column_table

    rows, ends, columns = sum(counts) + tail, torch.tensor(counts).cumsum(0).int(), 5
    table = column_table(ends.cuda(), rows, 2)
    assert table is not None
    before_group, width, before, parts = table.cpu().long().T[3:7, :, None]
    size = kernels.nvfp4_column_bytes(rows, columns, len(counts), 2)
    place = before_group * columns + before + torch.arange(columns) * width
    for base in range(4):
        found = stored((parts % 2**32).expand_as(place), place + base)
        assert torch.equal(found.sort().values, torch.arange(base, base + size))


def test_every_byte_is_stored_once():
    for counts, tail in [([33, 0, 64, 1, 95], 7), ([1, 2, 3, 4, 5, 6], 0), *random_counts(30)]:
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
