"""A checkpoint holds whole tensors: any number of ranks reads what any other wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from ranks import Ranks
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from twins import ADAM, Stack, assert_close, differing, stack_step

from backstash.nn import GroupedLinear
from backstash.weights import load_sharded_state, shard_weights, sharded_state, sharded_weights

pytestmark = pytest.mark.distributed
dcp: Any = torch.distributed.checkpoint


class Model(nn.Module):
    """Five rows, three experts, and a bias: nothing divides evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(2, 5)
        self.experts = GroupedLinear(3, 5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(self.stack(x), [1, 0, len(x) - 1])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    torch.manual_seed(number)
    optimizer.zero_grad()
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()


def write(group: Any, folder: str) -> None:
    model = Model()
    shard_weights(model, group)
    optimizer = ADAM(model.parameters())
    for number in range(2):
        step(model, optimizer, number)
    dcp.save(sharded_state(model, optimizer), checkpoint_id=folder, process_group=group)


def read(group: Any, folder: str) -> None:
    twin = Model()
    reference = ADAM(twin.parameters())
    for number in range(2):
        step(twin, reference, number)
    torch.manual_seed(77)
    model = Model()
    for p in model.parameters():
        nn.init.normal_(p)
    shard_weights(model, group)
    optimizer = ADAM(model.parameters())
    state = sharded_state(model, optimizer)
    dcp.load(state, checkpoint_id=folder, process_group=group)
    load_sharded_state(model, optimizer, state)
    assert_close(twin, model)
    # And the next step is the one that the writer would have made.
    for m, o in ((twin, reference), (model, optimizer)):
        step(m, o, 5)
    assert_close(twin, model)
    weight = next(iter(sharded_weights(model).values()))
    assert type(optimizer.state[weight]["exp_avg"]) is torch.Tensor


@pytest.mark.parametrize("writers", [1, 2, 3, 4])
def test_a_checkpoint_of_some_ranks_resumes_on_any_number(
    ranks: Ranks, tmp_path: Path, writers: int
) -> None:
    ranks.run(write, str(tmp_path), size=writers)
    for readers in (1, 2, 3, 4):
        ranks.run(read, str(tmp_path), size=readers)


def read_whole(group: Any, folder: str) -> None:
    model, twin = Model(), Model()
    reference = ADAM(twin.parameters())
    for number in range(2):
        step(twin, reference, number)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder, process_group=group)
    assert_close(twin, model)


def test_a_model_that_is_not_sharded_reads_it_too(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(write, str(tmp_path), size=3)
    ranks.run(read_whole, str(tmp_path), size=1)


def write_meanwhile(group: Any, folder: str, by_itself: bool) -> None:
    """A checkpoint that is written while the training goes on, which here is to zero it all."""
    options = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )
    model = Model()
    shard_weights(model, group)
    optimizer = ADAM(model.parameters())
    for number in range(2):
        step(model, optimizer, number)
    state = sharded_state(model, optimizer)
    stager = DefaultStager(options) if by_itself else None
    written: Any = dcp.async_save(
        state, checkpoint_id=folder, process_group=group, async_stager=stager
    )
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    getattr(written, "upload_completion", written).result()


@pytest.mark.parametrize("by_itself", [False, True], ids=["staged-by-the-writer", "by-itself"])
@pytest.mark.parametrize("writers", [1, 3])
def test_a_checkpoint_that_is_written_meanwhile_is_that_of_its_moment(
    ranks: Ranks, tmp_path: Path, writers: int, by_itself: bool
) -> None:
    ranks.run(write_meanwhile, str(tmp_path), by_itself, size=writers)
    ranks.run(read_whole, str(tmp_path), size=1)
    ranks.run(read, str(tmp_path), size=2)


def same_ranks(group: Any, folder: str) -> list[str]:
    twin, model = Stack(2), Stack(2)
    shard_weights(model, group)
    stack_step(model, 1)
    dcp.save(sharded_state(model), checkpoint_id=folder, process_group=group)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    state = sharded_state(model)
    dcp.load(state, checkpoint_id=folder, process_group=group)
    load_sharded_state(model, None, state)
    return differing(twin, model)


def test_weights_alone_come_back_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(same_ranks, str(tmp_path), size=3) == [[]] * 3
