"""What a rank has of the weights of a model, and how it becomes whole again.

A *shard* is this rank's rows of one weight.  The optimizer's state of a sharded weight is
cut like the weight, so the same two ways lead from the parts to the whole and back for all
of them: :meth:`Shards.whole` on the way to a checkpoint, :meth:`Shards.part` on the way back.
A checkpoint therefore holds whole tensors and knows nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from backstash.weights import ShardedWeight, sharded_weights
from backstash.weights.channel import Parcel
from backstash.weights.norm import norm_of_parts


class Shards:
    """The sharded weights of a model by name; none where a model has a process to itself."""

    def __init__(self, weights: Mapping[str, ShardedWeight] | None = None) -> None:
        self._weights = dict(weights or {})

    def whole(self, name: str, part: Tensor) -> Tensor:
        """Return the whole of a tensor that is cut like the weight ``name``.

        All ranks call it, in the same order, and only the first is given the whole, on the
        CPU: so no GPU holds more than one whole tensor, and no other rank any.  What is not
        cut, such as a counter of steps, is given back as it is.
        """
        weight = self._weights.get(name)
        if weight is None or part.ndim == 0:
            return part
        channel, cut = weight.sharding.channel, weight.cut
        rows = part.detach().as_subclass(Tensor).reshape(cut.counts[channel.rank], cut.columns)
        (whole,) = channel.gather([Parcel(rows, cut.counts)]).wait()
        if channel.rank:
            return part.new_empty(0)
        return whole.reshape(cut.shape).cpu()

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's rows of a tensor that :meth:`whole` returned, as a view."""
        weight = self._weights.get(name)
        if weight is None or whole.ndim == 0:
            return whole
        return weight.cut.shard(whole, weight.sharding.channel.rank)

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the norm of the gradients of all ranks together; all ranks call it.

        What every rank has whole is counted once.
        """
        if not self._weights:
            return get_total_norm(list(gradients.values()))
        channel = next(iter(self._weights.values())).sharding.channel
        parts = {
            channel: [g for name, g in gradients.items() if name in self._weights],
            None: [g for name, g in gradients.items() if name not in self._weights],
        }
        return norm_of_parts(parts, 2.0, device=next(iter(gradients.values())).device)


def count_parameters(model: nn.Module) -> int:
    """Return how many values the parameters of a model have, those of other ranks included."""
    sharded = sharded_weights(model)
    return sum(
        (sharded[name].cut.shape if name in sharded else p.shape).numel()
        for name, p in model.named_parameters()
    )
