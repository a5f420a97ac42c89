"""Where blocks lie, and the largest magnitudes of rows and columns."""

import numpy as np
import pytest
import torch

import definitions
from backstash import kernels
from backstash.kernels.reference import blocks
from definitions_block import cuts
from quantizer_cases import (
    INF,
    NAN,
    by_counts,
    by_dtype,
    by_special,
    grouped_values,
    matrix,
    special_matrix,
)

by_block = pytest.mark.parametrize("block", [1, 2, 16, 128])


@by_block
@by_counts
def test_blocks_of_groups_are_cut_as_defined(counts, block):
    rows, ends = sum(counts) + 5, torch.tensor(counts).cumsum(0).int()
    found = blocks.block_rows(ends, rows, block)
    wanted = cuts(counts, block)
    assert len(found) == -(-rows // block) + len(counts)
    assert len(wanted) < len(found)
    for row_B, cut in zip(found.tolist(), wanted, strict=False):
        assert [row for row in row_B if row < rows] == list(range(cut.start, cut.stop))
    assert (found[len(wanted) :] == rows).all()
    per_group = [-(-count // block) for count in counts]
    assert kernels.block_ends(ends, rows, block).tolist() == np.cumsum(per_group).tolist()


@by_block
@by_counts
def test_rows_know_their_block_and_the_tail_is_in_one_that_nobody_uses(counts, block):
    rows, ends = sum(counts) + 5, torch.tensor(counts).cumsum(0).int()
    block_M, place_M = blocks.row_places(ends, rows, block, ends.device)
    for number, cut in enumerate(cuts(counts, block)):
        assert (block_M[cut] == number).all()
        assert place_M[cut].tolist() == list(range(cut.stop - cut.start))
    assert (block_M[sum(counts) :] == -(-rows // block) + len(counts) - 1).all()


def test_ends_past_the_buffer_are_cut_at_it():
    ends = torch.tensor([3, 9, 40], dtype=torch.int32)
    assert kernels.block_ends(ends, 7, 4).tolist() == [1, 2, 2]
    assert (blocks.block_rows(ends, 7, 4) <= 7).all()


@by_dtype
@by_special
def test_row_and_column_amax_ignore_nan(special, dtype):
    x = special_matrix(special).to(dtype)
    x_MK = matrix(x)
    assert kernels.row_amax(x).flatten().tolist() == [definitions.amax(row) for row in x_MK]
    assert kernels.column_amax(x).flatten().tolist() == [definitions.amax(c) for c in x_MK.T]


@by_counts
def test_column_amax_is_that_of_each_group_and_never_of_the_tail(counts):
    x, ends = grouped_values(counts, 7)
    x[sum(counts) + 1 :] = INF
    groups = np.split(matrix(x)[: sum(counts)], np.cumsum(counts)[:-1])
    wanted = [[definitions.amax(column) for column in group.T] for group in groups]
    assert kernels.column_amax(x, ends).tolist() == wanted


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)], ids=str)
def test_amax_of_nothing_is_zero(shape):
    x = torch.full(shape, NAN)
    assert kernels.row_amax(x).tolist() == [[0.0]] * shape[0]
    assert kernels.column_amax(x).tolist() == [[0.0] * shape[1]]
    ends = torch.tensor([0, shape[0]], dtype=torch.int32)
    assert kernels.column_amax(x, ends).tolist() == [[0.0] * shape[1]] * 2
