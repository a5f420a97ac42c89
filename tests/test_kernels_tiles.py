"""Groups are worked on longest first, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import importlib

import pytest
import torch

from interpreter import by_device, run_interpreted
from quantizer_cases import by_counts


def test_the_interpreted_kernels_pass_these_tests() -> None:
    run_interpreted(__file__)


def groups_by_size(ends, rows, device):
    tiles = importlib.import_module("backstash.kernels.tiles")
    return tiles.groups_by_size(torch.tensor(ends, device=device), rows).cpu()


@by_device
@by_counts
def test_the_largest_group_comes_first_and_equal_ones_keep_their_order(counts, device):
    ends = torch.tensor(counts).cumsum(0).tolist()
    order = sorted(range(len(counts)), key=lambda g: -counts[g])
    wanted = [[ends[g] - counts[g], ends[g], g, 0] for g in order]
    assert groups_by_size(ends, sum(counts), device).tolist() == wanted


@by_device
def test_ends_outside_the_buffer_are_cut_at_it(device):
    assert groups_by_size([-3, 9, 40], 7, device)[:, :2].tolist() == [[0, 7], [0, 0], [7, 7]]


@by_device
@pytest.mark.parametrize("rows", [0, 90, 100, 4096])
@by_counts
def test_the_table_of_blocks_says_how_many_blocks_hold_rows(counts, rows, device):
    blocks = importlib.import_module("backstash.kernels.blocks")
    rows = max(rows, sum(counts))
    ends = torch.tensor(counts, device=device).cumsum(0).int()
    table = blocks.block_table(ends, rows, 32).cpu()
    used = int(table[0, 3])
    assert (table[:used, 0] < table[:used, 1]).all()
    assert (table[used:, 0] >= table[used:, 1]).all()
    assert int((table[:used, 1] - table[:used, 0]).sum()) == rows
