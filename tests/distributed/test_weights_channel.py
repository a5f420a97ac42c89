"""Collectives of uneven rows: padded on the wire, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks

from backstash.errors import ConfigError
from backstash.weights import channel as channels
from backstash.weights.channel import Channel, Parcel

pytestmark = pytest.mark.distributed

COUNTS = [[2, 2, 1, 0], [3, 0, 4, 1], [0, 0, 5, 0], [1, 1, 1, 1]]


def wholes(rank: int) -> list[torch.Tensor]:
    """Matrices of each rank, of whole numbers that add up exactly in any order."""
    shapes = [(sum(counts), width) for width, counts in enumerate(COUNTS, start=1)]
    return [torch.arange(float(r * w)).reshape(r, w) + 100 * rank for r, w in shapes]


def mine(matrix: torch.Tensor, counts: list[int], rank: int) -> torch.Tensor:
    return matrix.split(counts)[rank]


def gathering(group: Any, dtypes: list[torch.dtype]) -> int:
    channel = Channel(group)
    full = [matrix.to(dtype) for matrix, dtype in zip(wholes(0), dtypes, strict=True)]
    parcels = [
        Parcel(mine(matrix, counts, channel.rank), tuple(counts))
        for matrix, counts in zip(full, COUNTS, strict=True)
    ]
    arrival = channel.gather(parcels)
    arrived = arrival.wait()
    assert all(torch.equal(a, b) for a, b in zip(arrived, full, strict=True))
    wanted = sum(
        4 * max(counts) * width * dtype.itemsize
        for width, (counts, dtype) in enumerate(zip(COUNTS, dtypes, strict=True), start=1)
    )
    assert channel.wire_bytes == wanted
    return channel.wire_bytes


MIXED = [torch.uint8, torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize(
    "dtypes", [[torch.bfloat16] * 4, MIXED], ids=["one dtype", "codes with float scales"]
)
def test_a_gather_brings_the_rows_of_all_ranks_in_order(
    ranks: Ranks, dtypes: list[torch.dtype]
) -> None:
    ranks.run(gathering, dtypes, size=4)


def reducing(group: Any, dtype: torch.dtype) -> None:
    channel = Channel(group)
    counts = [tuple(c) for c in COUNTS]
    total = [sum(parts).to(dtype) for parts in zip(*(wholes(r) for r in range(4)), strict=True)]  # pyright: ignore
    given = [matrix.to(dtype) for matrix in wholes(channel.rank)]
    for matrix, c, shard in zip(total, counts, channel.scatter(given, counts).wait(), strict=True):
        assert torch.equal(shard, mine(matrix, list(c), channel.rank))
    sent = channel.wire_bytes
    for number, pieces in enumerate(channel.exchange(given, counts).wait()):
        for rank, piece in enumerate(pieces.chunk(4)):
            here = mine(wholes(rank)[number].to(dtype), COUNTS[number], channel.rank)
            assert torch.equal(piece[: len(here)], here)
    # Adding up here or on the way costs the same bytes.
    assert channel.wire_bytes == 2 * sent


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_reduction_brings_each_rank_the_sum_of_its_rows(ranks: Ranks, dtype: torch.dtype) -> None:
    ranks.run(reducing, dtype, size=4)


def agreeing(group: Any) -> None:
    channel = Channel(group)
    assert channel.agree(channel.rank + 5) == (5, 7)
    assert channel.any_of([channel.rank == 1, False]) == [True, False]
    x = torch.tensor([float(channel.rank), -1.0])
    assert channel.largest(x).tolist() == [2.0, -1.0]
    assert channel.total(x).tolist() == [3.0, -3.0]
    assert x[0] == channel.rank


def test_ranks_agree_and_leave_what_they_gave_as_it_was(ranks: Ranks) -> None:
    ranks.run(agreeing, size=3)


def not_on_the_host(group: Any) -> None:
    answers = channels._answers_on_host
    channels._answers_on_host = lambda group: False
    try:
        with pytest.raises(ConfigError, match="cpu:gloo,cuda:nccl"):
            Channel(group)
    finally:
        channels._answers_on_host = answers


def test_a_group_that_cannot_answer_on_the_host_is_refused(ranks: Ranks) -> None:
    ranks.run(not_on_the_host, size=1)
