"""Shards are whole rows, in rank order, and together they are the weight."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backstash.errors import ShapeError
from backstash.weights.layout import Layout, Split

SHAPES = st.one_of(
    st.tuples(st.integers(1, 70), st.integers(1, 3)),
    st.tuples(st.integers(1, 6), st.integers(1, 70), st.integers(1, 3)),
)


@given(
    SHAPES,
    st.integers(1, 5),
    st.sampled_from([Split.AUTO, Split.ROWS, Split.EXPERTS]),
    st.sampled_from([1, 32]),
)
def test_the_shards_of_all_ranks_one_after_another_are_the_weight(
    shape: tuple[int, ...], ranks: int, split: Split, block: int
) -> None:
    layout = Layout.even(torch.Size(shape), ranks, split=split, block=block)
    full = torch.arange(torch.Size(shape).numel()).reshape(shape)
    shards = [layout.shard(full, rank) for rank in range(ranks)]
    assert all(s.shape == layout.shard_shape(r) for r, s in enumerate(shards))
    assert torch.equal(torch.cat([s.reshape(-1) for s in shards]), full.reshape(-1))


@given(SHAPES, st.integers(1, 5), st.sampled_from([Split.AUTO, Split.ROWS, Split.EXPERTS]))
def test_a_block_of_rows_is_whole_on_one_rank(
    shape: tuple[int, ...], ranks: int, split: Split
) -> None:
    layout = Layout.even(torch.Size(shape), ranks, split=split, block=32)
    N = shape[-2]
    assert all(cut % N % 32 == 0 for cut in layout.cuts[:-1] if cut < layout.rows)


@pytest.mark.parametrize(
    ("shape", "ranks", "counts"),
    [
        ((5, 3), 4, (2, 2, 1, 0)),
        ((3, 2), 4, (1, 1, 1, 0)),
        ((8, 2), 4, (2, 2, 2, 2)),
        ((4, 6, 2), 2, (12, 12)),
        ((3, 5, 2), 2, (8, 7)),
    ],
    ids=str,
)
def test_shards_are_as_even_as_whole_rows_allow(
    shape: tuple[int, ...], ranks: int, counts: tuple[int, ...]
) -> None:
    assert Layout.even(torch.Size(shape), ranks).counts == counts


def test_experts_that_divide_evenly_stay_whole_and_others_are_cut_between_rows() -> None:
    assert Layout.even(torch.Size((4, 6, 2)), 2).shard_shape(1) == (2, 6, 2)
    assert Layout.even(torch.Size((3, 5, 2)), 2).shard_shape(1) == (7, 2)
    by_expert = Layout.even(torch.Size((3, 5, 2)), 2, split=Split.EXPERTS)
    assert [by_expert.shard_shape(rank) for rank in (0, 1)] == [(2, 5, 2), (1, 5, 2)]


def test_the_ends_of_experts_in_a_shard_are_those_of_the_weight_moved_and_clipped() -> None:
    layout = Layout.even(torch.Size((3, 5, 2)), 2)
    ends = [layout.shard_ends(rank, torch.device("cpu")) for rank in (0, 1)]
    assert [e.tolist() for e in ends if e is not None] == [[5, 8, 8], [0, 2, 7]]


@pytest.mark.parametrize("shape", [(3,), (2, 2, 2, 2)], ids=str)
def test_what_is_no_weight_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="choose other parameters with filter="):
        Layout.even(torch.Size(shape), 2)


@pytest.mark.parametrize(
    ("shape", "split", "block", "counts"),
    [
        ((5, 3), Split.ROWS, 1, (2, 2, 1, 0)),
        ((130, 3), Split.ROWS, 32, (64, 64, 2, 0)),
        ((3, 2, 3), Split.EXPERTS, 1, (2, 2, 2, 0)),
        ((5, 2, 3), Split.EXPERTS, 32, (4, 4, 2, 0)),
        ((2, 64, 3), Split.ROWS, 32, (32, 32, 32, 32)),
    ],
    ids=str,
)
def test_shards_are_as_even_as_whole_blocks_and_experts_allow(
    shape: tuple[int, ...], split: Split, block: int, counts: tuple[int, ...]
) -> None:
    assert Layout.even(torch.Size(shape), 4, split=split, block=block).counts == counts
