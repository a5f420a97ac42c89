"""Both models take the same step, and the bytes of both are counted alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from backstash.bench.weights_contest import Contest, Setting, Shape, Wire, relative_error

CPU = torch.device("cpu")
SHAPE = Shape(blocks=2, hidden=64, ffn=96, tokens=8, dtype=torch.float32)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    store = dist.HashStore()  # pyright: ignore
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_nothing_is_timed_when_a_gradient_differs() -> None:
    contest = Contest(Setting(), SHAPE, CPU)
    with torch.no_grad():
        next(contest.theirs.parameters()).to_local().mul_(1.5)
    with pytest.raises(RuntimeError, match="differs from fully_shard's"):
        contest.check_outputs()


@pytest.mark.usefixtures("group_of_one")
def test_both_have_the_same_weights_and_the_ones_on_whole_weights_too() -> None:
    contest = Contest(Setting(), SHAPE, CPU)
    losses = [contest.step(m) for m in (contest.ours, contest.whole, contest.theirs, contest.plain)]
    assert all(torch.equal(loss, losses[0]) for loss in losses)


@pytest.mark.usefixtures("group_of_one")
def test_the_wire_counts_whole_weights_and_whole_gradients() -> None:
    part, whole, two = torch.zeros(4), torch.zeros(4), [torch.zeros(4), torch.zeros(3)]
    group: Any = dist.group.WORLD
    with Wire() as wire:
        group._allgather_base(whole, part).wait()
        group._reduce_scatter_base(part, whole).wait()
        group.allgather_into_tensor_coalesced(two, [t.clone() for t in two]).wait()
        group.reduce_scatter_tensor_coalesced(two, [t.clone() for t in two]).wait()
        dist.all_reduce(whole)
    assert wire.bytes == 2 * 4 * 4 + 2 * 7 * 4


def test_the_error_is_relative_to_the_yardstick() -> None:
    assert relative_error(torch.full((4,), 1.5), torch.ones(4)) == 0.5
