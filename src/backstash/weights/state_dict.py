"""Model and optimizer as one state for ``torch.distributed.checkpoint``.

The state dict of a sharded module says of each weight which rows it holds.  An optimizer does
not know that its moments are those of a shard, so they are told here.  A checkpoint then holds
whole tensors, and any number of ranks reads it, or one process without any sharding::

    state = sharded_state(model, optimizer)
    torch.distributed.checkpoint.save(state, checkpoint_id=folder)

    state = sharded_state(model, optimizer)          # any number of ranks
    torch.distributed.checkpoint.load(state, checkpoint_id=folder)
    load_sharded_state(model, optimizer, state)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from backstash.weights.chunks import ShardView
from backstash.weights.sharded import ShardedWeight, sharded_weights


def sharded_state(
    module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """``{"model": ..., "optimizer": ...}``; tensors share the memory of what they describe.

    The state of an optimizer that has made no step yet is made, as zeros, so that a
    checkpoint can be loaded into it.  The names of the optimizer's state are those of the
    parameters, so neither their order nor the number of ranks matters.
    """
    state: dict[str, Any] = {"model": module.state_dict()}
    if optimizer is not None:
        state["optimizer"] = _optimizer_state(module, optimizer)
    return state


def load_sharded_state(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, state: dict[str, Any]
) -> None:
    """Take over what was loaded into :func:`sharded_state`."""
    module.load_state_dict(state["model"])
    if optimizer is not None:
        from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

        set_optimizer_state_dict(module, optimizer, _plain(state["optimizer"]))


def _optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    state: dict[str, Any] = get_optimizer_state_dict(module, optimizer)
    weights = sharded_weights(module)
    for name, values in state["state"].items():
        if (weight := weights.get(name)) is not None:
            state["state"][name] = {key: _described(v, weight) for key, v in values.items()}
    return state


def _described(value: Any, weight: ShardedWeight) -> Any:
    """A moment of a shard as its part of the whole; a step counter as it is."""
    if not isinstance(value, Tensor) or value.shape != weight.shape:
        return value
    return ShardView.of(value.detach(), weight.cut, weight.sharding.channel.rank)


def _plain(state: Any) -> Any:
    if isinstance(state, ShardView):
        return state.as_subclass(Tensor)
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state
