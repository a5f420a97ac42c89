"""The whole model as one safetensors file, written rank by rank.

No rank ever has the whole model, or one whole weight, in memory: rows that follow each other
in a weight follow each other in the file, so the first rank writes the header, and then each
rank in its turn writes its own rows to where they belong.  The file appears under its name
when it is complete.  The folder must be one that all ranks see.

The format is an eight-byte length, a JSON header of that length, and the tensors' bytes
(https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from backstash.errors import CheckpointError, ConfigError, PeerError
from backstash.tensors import to_plain
from backstash.weights.channel import Channel
from backstash.weights.chunks import ShardView
from backstash.weights.sharded import sharded_weights

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def export_safetensors(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the state dict of a sharded module with whole weights; all its ranks call it.

    Raises:
        ConfigError: Nothing in the module is sharded.
        CheckpointError: A tensor has a dtype that the file format does not know, or this rank
            could not write.
        PeerError: Another rank could not write, or is gone.
    """
    weights = sharded_weights(module)
    if not weights:
        raise ConfigError(
            f"{type(module).__name__} has no sharded weights; write module.state_dict() with "
            "safetensors.torch.save_file"
        )
    channel = next(iter(weights.values())).sharding.channel
    state, metadata = to_plain(module.state_dict())
    header, starts = _header(state, metadata)
    target = Path(path)
    unfinished = target.with_name(target.name + ".unfinished")
    end = len(header) + sum(_whole_bytes(tensor) for tensor in state.values())
    _in_turn(channel, 0, lambda: _create(unfinished, header, end))
    for rank in range(channel.size):
        _in_turn(channel, rank, lambda: _write_mine(unfinished, state, starts, channel.rank))
    _in_turn(channel, 0, lambda: os.replace(unfinished, target))


def _header(
    state: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The bytes before the tensors, and where in the file each tensor begins."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    starts, position = {}, 0
    for name, tensor in state.items():
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"safetensors has no name for {tensor.dtype}, the dtype of {name}; convert it"
            )
        end = position + _whole_bytes(tensor)
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(_whole_shape(tensor)),
            "data_offsets": [position, end],
        }
        starts[name], position = position, end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: start + len(header) for name, start in starts.items()}


def _create(path: Path, header: bytes, end: int) -> None:
    with path.open("wb") as file:
        file.write(header)
        file.truncate(end)


def _write_mine(
    path: Path, state: Mapping[str, Tensor], starts: Mapping[str, int], rank: int
) -> None:
    """Write the rows of this rank; the first rank also what all have whole."""
    with path.open("r+b") as file:
        for name, tensor in state.items():
            offset = 0
            if isinstance(tensor, ShardView):
                offset = tensor.cut.cuts[rank] * tensor.cut.columns * tensor.element_size()
                tensor = tensor.as_subclass(Tensor)
            elif rank:
                continue
            file.seek(starts[name] + offset)
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)


def _in_turn(channel: Channel, rank: int, write: Callable[[], Any]) -> None:
    """Let one rank write while the others wait; if it fails, all raise."""
    failure: Exception | None = None
    if channel.rank == rank:
        try:
            write()
        except Exception as error:  # the others wait, whatever it is
            failure = error
    (failed,) = channel.any_of([failure is not None])
    if failure is not None:
        raise CheckpointError(
            f"the weights could not be written ({failure!r}); make room, or choose another folder"
        ) from failure
    if failed:
        raise PeerError(f"rank {rank} could not write its part of the weights; see its output")


def _whole_shape(tensor: Tensor) -> torch.Size:
    return tensor.cut.shape if isinstance(tensor, ShardView) else tensor.shape


def _whole_bytes(tensor: Tensor) -> int:
    return _whole_shape(tensor).numel() * tensor.element_size()
