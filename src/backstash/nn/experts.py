"""One 3-D parameter for the weights of all experts, also where a file has one for each.

A state dict says ``weight`` of shape ``(G, N, K)``.  Files of other software often say
``weight0`` to ``weight{G-1}`` of shape ``(N, K)``; those load as well, also strictly.

Letters: G experts, N output features, K input features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from backstash.tensors import QuantizedTensor


def join_experts(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Stack ``{prefix}{name}0`` and so on into ``{prefix}{name}``, for each parameter.

    Registered as a load-state-dict pre-hook.  A set of keys that is not complete is left
    as it is, and reported by torch as missing and unexpected keys.
    """
    for name, parameter in module.named_parameters(recurse=False):
        keys = [f"{prefix}{name}{g}" for g in range(parameter.shape[0])]
        if not keys or not all(key in state_dict for key in keys):
            continue
        experts = [state_dict[key] for key in keys]
        if len({tuple(expert.shape) for expert in experts}) > 1:
            continue
        for key in keys:
            del state_dict[key]
        state_dict[f"{prefix}{name}"] = torch.stack(experts)


def split_experts(module: nn.Module) -> dict[str, Tensor]:
    """The parameters as ``{name}0`` and so on, one tensor for each expert.

    They are views of the 3-D ones; of a weight that is kept in low precision, its values.
    """
    state = {}
    for name, parameter in module.named_parameters(recurse=False):
        values = parameter.detach()
        if isinstance(values, QuantizedTensor):
            values = values.dequantize()
        state |= {f"{name}{g}": expert for g, expert in enumerate(values.unbind(0))}
    return state
