"""A shard is some boxes of the whole, and together the boxes are the whole."""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex

from backstash.weights.chunks import ShardView
from backstash.weights.layout import Layout, Split

SHAPES = st.one_of(
    st.tuples(st.integers(1, 20), st.integers(1, 3)),
    st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(1, 3)),
)


def views(shape: tuple[int, ...], ranks: int, split: Split) -> tuple[torch.Tensor, list[ShardView]]:
    full = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    cut = Layout.even(full.shape, ranks, split=split)
    return full, [ShardView.of(cut.shard(full, r).clone(), cut, r) for r in range(ranks)]


@given(SHAPES, st.integers(1, 4), st.sampled_from([Split.ROWS, Split.EXPERTS]))
def test_the_boxes_of_all_ranks_are_the_whole_and_each_value_is_in_one(
    shape: tuple[int, ...], ranks: int, split: Split
) -> None:
    full, shards = views(shape, ranks, split)
    found = torch.full(shape, torch.nan)
    for shard in shards:
        chunks = shard.__create_chunk_list__()
        assert len(chunks) <= 3
        for chunk in chunks:
            place = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            assert found[place].isnan().all()
            found[place] = shard.__get_tensor_shard__(MetadataIndex("w", chunk.offsets))
    assert torch.equal(found, full)


def test_what_is_written_has_the_size_of_the_whole() -> None:
    _, shards = views((3, 5, 2), 2, Split.ROWS)
    items = shards[1].__create_write_items__("w", shards[1])
    assert [tuple(item.tensor_data.size) for item in items] == [(3, 5, 2)] * 2
    assert [tuple(item.index.offset) for item in items] == [(1, 3, 0), (2, 0, 0)]


def test_a_piece_shares_the_memory_of_the_shard() -> None:
    _, shards = views((4, 2), 2, Split.ROWS)
    shards[1].__get_tensor_shard__(MetadataIndex("w", torch.Size((2, 0)))).fill_(7)
    assert shards[1].as_subclass(torch.Tensor).eq(7).all()


def test_an_empty_shard_has_no_boxes() -> None:
    _, shards = views((1, 2), 3, Split.ROWS)
    assert [len(shard.__create_chunk_list__()) for shard in shards] == [1, 0, 0]


@pytest.mark.parametrize("weights_only", [True, False])
def test_in_a_file_of_one_rank_it_is_a_plain_tensor(*, weights_only: bool) -> None:
    _, shards = views((4, 2), 2, Split.ROWS)
    file = io.BytesIO()
    torch.save({"w": shards[0]}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=weights_only)["w"]
    assert type(loaded) is torch.Tensor
    assert torch.equal(loaded, shards[0].as_subclass(torch.Tensor))
