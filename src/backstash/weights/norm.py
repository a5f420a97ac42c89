"""The norm of a gradient of which each rank has a part.

A part of the sum is here, and the rest on the other ranks of the weight's group; what every
rank keeps whole is here altogether and must be counted once.  ``torch.nn.utils`` knows of
neither, and would clip each rank by a number of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from backstash.errors import ConfigError
from backstash.weights.channel import Channel
from backstash.weights.sharded import ShardedWeight


def gradient_norm(
    parameters: Iterable[Tensor], norm_type: float = 2.0, *, across: dist.ProcessGroup | None = None
) -> Tensor:
    """The norm of all gradients together, the same on every rank; all ranks call it.

    Args:
        parameters: Sharded weights and others; those without a gradient count as zeros.
        norm_type: p of the p-norm, or ``float("inf")``.
        across: A group whose ranks hold *other* parameters, such as other experts: their
            norms are taken together.

    Returns:
        A float32 scalar on the device of the parameters.

    Raises:
        ConfigError: There are no parameters, or the norm is none.
        PeerError: Another rank failed or is gone.
    """
    parameters = list(parameters)
    if not parameters or not norm_type > 0:
        raise ConfigError(
            f"gradient_norm needs parameters and a norm above zero, got {len(parameters)} "
            f"parameters and {norm_type!r}"
        )
    parts: dict[Channel | None, list[Tensor]] = {None: []}
    for p in parameters:
        sharding = p.sharding if isinstance(p, ShardedWeight) else None
        part = parts.setdefault(sharding and sharding.channel, [])
        if p.grad is not None:
            part.append(p.grad.detach())
    return norm_of_parts(parts, norm_type, device=parameters[0].device, across=across)


def norm_of_parts(
    parts: Mapping[Channel | None, Sequence[Tensor]],
    norm_type: float,
    *,
    device: torch.device,
    across: dist.ProcessGroup | None = None,
) -> Tensor:
    """The norm of tensors of which each rank of a channel has some rows; all ranks call it.

    What every rank has whole is under None, and counts once.
    """
    largest = norm_type == float("inf")
    # Powers of norms that are far from one leave the range of float32.
    total = zero = torch.zeros((), dtype=torch.float64, device=device)
    for channel, tensors in parts.items():
        here = [_power(x, norm_type).to(device) for x in tensors if x.numel()]
        part = _together([zero, *here], largest=largest)
        if channel is not None:
            part = (channel.largest if largest else channel.total)(part)
        total = _together([total, part], largest=largest)
    if across is not None:
        dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=across)
    return (total if largest else total ** (1.0 / norm_type)).float()


def clip_gradients_(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, **across: Any
) -> Tensor:
    """Scale all gradients down so that their norm is at most ``max_norm``; all ranks call it.

    Returns:
        The norm before, as :func:`gradient_norm` gives it for the same arguments.

    Raises:
        ConfigError: ``max_norm`` is no number of at least 0, or as :func:`gradient_norm`.
        PeerError: As :func:`gradient_norm`.
    """
    if not isinstance(max_norm, (int, float)) or not max_norm >= 0:
        raise ConfigError(
            f"max_norm must be a number of at least 0, got {max_norm!r}; pass float('inf') to "
            "leave gradients as they are"
        )
    parameters = list(parameters)
    norm = gradient_norm(parameters, norm_type, **across)
    # Torch multiplies a list of gradients at once, and those of ``fully_shard`` only by themselves.
    for kind in {type(p.grad) for p in parameters}:
        alike = [p for p in parameters if type(p.grad) is kind]
        torch.nn.utils.clip_grads_with_norm_(alike, max_norm, norm)
    return norm


def _power(x: Tensor, norm_type: float) -> Tensor:
    """What a tensor adds to the sum of powers; of the norm of the largest, its largest."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm: Any = torch.linalg.vector_norm(x, norm_type, dtype=wide).double()
    # Of a tensor that is sharded over another axis it is the norm of all of it.
    norm = getattr(norm, "full_tensor", lambda: norm)()
    return norm if norm_type == float("inf") else norm**norm_type


def _together(parts: list[Tensor], *, largest: bool) -> Tensor:
    stacked = torch.stack(parts)
    return stacked.max() if largest else stacked.sum()
