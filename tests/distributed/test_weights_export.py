"""The whole model as one file, of which each rank writes its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from safetensors.torch import load_file
from torch import nn

from backstash.errors import CheckpointError, ConfigError, PeerError
from backstash.nn import GroupedMLP, Linear
from backstash.weights import ShardOptions, export_safetensors, shard_weights
from backstash.weights.channel import Channel
from backstash.weights.export import _in_turn

pytestmark = pytest.mark.distributed


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.experts = GroupedMLP(3, 5, 2, dtype=torch.bfloat16)
        self.head = Linear(5, 5)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("nothing", torch.zeros(0, 2))


def write(group: Any, path: str, split: str) -> None:
    model = Model()
    sharding = shard_weights(model, group, options=ShardOptions(split=split))
    export_safetensors(model, path)
    # No weight was gathered for it.
    assert sharding.channel.leases.peak_bytes == 0


@pytest.mark.parametrize("split", ["experts", "rows"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_file_is_the_state_dict_of_the_whole_model(
    ranks: Ranks, tmp_path: Path, size: int, split: str
) -> None:
    path = tmp_path / "model.safetensors"
    ranks.run(write, str(path), split, size=size)
    wanted, came = Model().state_dict(), load_file(path)
    assert came.keys() == wanted.keys()
    assert all(torch.equal(came[name], wanted[name]) for name in wanted)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def nowhere(group: Any, path: str) -> None:
    model = Model()
    rank = shard_weights(model, group).channel.rank
    with pytest.raises(CheckpointError if rank == 0 else PeerError, match="could not"):
        export_safetensors(model, path)


def test_a_folder_that_is_not_there_is_an_error_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(nowhere, str(tmp_path / "no" / "model.safetensors"))


def failing(group: Any) -> None:
    channel = Channel(group)

    def write() -> None:
        raise RuntimeError("no memory to copy a shard to the host")

    with pytest.raises(CheckpointError if channel.rank == 1 else PeerError, match="could not"):
        _in_turn(channel, 1, write)


def test_whatever_fails_on_one_rank_is_an_error_on_every_rank(ranks: Ranks) -> None:
    ranks.run(failing)


def test_a_model_without_sharded_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no sharded weights"):
        export_safetensors(Linear(2, 2), tmp_path / "model.safetensors")
