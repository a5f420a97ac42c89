"""Transposed codes group by group: what is packed comes back, and is a prefix of the buffer."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backstash import kernels
from backstash.kernels.reference.nvfp4_columns import group_factor, pack_columns, unpack_columns
from quantizer_cases import by_counts


def blocks_of(counts, columns, tail=5):
    """Bytes of every block, zero where a group has no rows, and where the groups end."""
    rows = sum(counts) + tail
    ends = torch.tensor(counts).cumsum(0).int()
    blocks = torch.zeros(-(-rows // 16) + len(counts), columns, 8, dtype=torch.uint8)
    block = 0
    for count in counts:
        for first in range(0, count, 16):
            pairs = min(-(-(count - first) // 2), 8)
            blocks[block, :, :pairs] = torch.randint(1, 256, (columns, pairs)).byte()
            block += 1
    return blocks, ends, rows


@by_counts
@pytest.mark.parametrize("multiple", [2, 16])
@pytest.mark.parametrize("columns", [1, 7])
def test_what_is_packed_comes_back_and_fills_a_prefix(counts, multiple, columns):
    check(counts, columns, 5, multiple)


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(0, 70), min_size=1, max_size=6),
    columns=st.integers(0, 5),
    tail=st.integers(0, 40),
    multiple=st.sampled_from([2, 16]),
)
def test_any_groups_come_back(counts, columns, tail, multiple):
    check(counts, columns, tail, multiple)


def check(counts, columns, tail, multiple):
    blocks, ends, rows = blocks_of(counts, columns, tail)
    if multiple == 16:  # whole blocks are kept, also where a group has no row
        blocks = torch.where(blocks.any(-1, keepdim=True).bool(), blocks | 1, blocks)
    packed = pack_columns(blocks, rows, ends, multiple)
    assert packed.shape == (kernels.nvfp4_column_bytes(rows, columns, len(counts), multiple),)
    shape = (len(blocks), columns)
    assert torch.equal(unpack_columns(packed, shape, rows, ends, multiple), blocks)

    valid = kernels.nvfp4_column_ends(ends, rows, columns, multiple)
    widths = [-(-count // multiple) * multiple // 2 for count in counts]
    assert valid.diff(prepend=torch.zeros(1).long()).tolist() == [columns * w for w in widths]
    assert not packed[int(valid[-1]) :].any()
    poisoned = packed.clone()
    poisoned[int(valid[-1]) :] = 255
    assert torch.equal(unpack_columns(poisoned, shape, rows, ends, multiple), blocks)


@pytest.mark.parametrize("multiple", [2, 16])
def test_groups_of_whole_blocks_take_half_a_byte_an_element(multiple):
    ends = torch.tensor([32, 32, 80], dtype=torch.int32)
    assert kernels.nvfp4_column_ends(ends, 96, 10, multiple).tolist() == [160, 160, 400]


@pytest.mark.parametrize("rows", [0, 1, 2, 15, 16, 33])
@pytest.mark.parametrize("multiple", [2, 16])
def test_one_matrix_is_one_group(rows, multiple):
    blocks, ends, _ = blocks_of([rows], 3, 0)
    one = pack_columns(blocks[: -(-rows // 16)], rows, None, multiple)
    assert torch.equal(one, pack_columns(blocks, rows, ends, multiple))
    shape = (-(-rows // 16), 3)
    assert torch.equal(unpack_columns(one, shape, rows, None, multiple), blocks[: shape[0]])


def test_a_block_has_the_factor_of_its_group_and_one_where_it_has_none():
    ends = torch.tensor([17, 17, 20], dtype=torch.int32)
    factors = group_factor(torch.tensor([2.0, 3.0, 4.0]), ends, 40)
    assert factors.flatten().tolist() == [2.0, 2.0, 4.0, 1.0, 1.0, 1.0]
    of_columns = group_factor(torch.tensor([[2.0, 5.0]]), None, 40)
    assert of_columns.tolist() == [[2.0, 5.0]]
