"""Where blocks of rows and their bytes are, as a GPU finds it and as the reference does."""

import pytest
import torch

from backstash import kernels
from backstash.kernels.reference.blocks import block_rows
from quantizer_cases import by_counts
from twin_cases import random_counts

pytestmark = pytest.mark.gpu


def check(counts, tail, multiple):
    from backstash.kernels.nvfp4_places import column_table

    rows, ends = sum(counts) + tail, torch.tensor(counts).cumsum(0).int()
    table = column_table(ends.cuda(), rows, multiple)
    assert table is not None
    first, end, group, before_group, width, before = table.cpu().long().T[:6]
    units = kernels.nvfp4_column_ends(ends, rows, 1, multiple)
    used = int(kernels.block_ends(ends, rows, 16)[-1])
    rows_SB = block_rows(ends, rows, 16)
    assert torch.equal(first[:used], rows_SB[:used, 0])
    assert torch.equal((end - first)[:used], (rows_SB < rows)[:used].sum(1))
    widths = units.diff(prepend=units.new_zeros(1))
    assert torch.equal(width[:used], widths[group[:used]])
    assert torch.equal(before_group[:used], (units - widths)[group[:used]])
    starts = ends.long() - torch.tensor(counts)
    assert torch.equal(before[:used], (first[:used] - starts[group[:used]]) // 2)
    # What is left of the rows and of the buffer is divided among the blocks that are left.
    assert (group[used:] == len(counts)).all()
    spans = zip(first[used:].tolist(), end[used:].tolist(), strict=True)
    covered = [row for start, stop in spans for row in range(start, stop)]
    assert covered == list(range(sum(counts), rows))
    spans = zip(before_group[used:].tolist(), width[used:].tolist(), strict=True)
    covered = [byte for start, size in spans for byte in range(start, start + size)]
    size = kernels.nvfp4_column_bytes(rows, 1, len(counts), multiple)
    assert covered == list(range(int(units[-1]), size))


@by_counts
@pytest.mark.parametrize("multiple", [2, 16])
def test_a_table_says_what_the_reference_does(counts, multiple):
    check(counts, 5, multiple)


@pytest.mark.parametrize("multiple", [2, 16])
def test_tables_of_random_splits_say_what_the_reference_does(multiple):
    for counts, tail in random_counts(100):
        check(counts, tail, multiple)
