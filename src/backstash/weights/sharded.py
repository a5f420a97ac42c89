"""``ShardedWeight``: a parameter of which this process holds some rows.

To an optimizer it is an ordinary parameter of the shape of its shard.  To a module of this
library it is a distributed weight: asked before a matmul it gives the whole weight, gathered
from all ranks, and it takes the whole gradient and reduces it to that of the shard.  To
``torch.distributed.checkpoint`` it is its part of the whole.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from backstash.errors import ConfigError
from backstash.formats import Usage
from backstash.weights.bundle import Bundle
from backstash.weights.chunks import ShardView
from backstash.weights.layout import Layout
from backstash.weights.sharding import Sharding
from backstash.weights.states import State


class ShardedWeight(nn.Parameter):
    """One shard of a weight; made by :func:`shard_weights`.

    Attributes:
        key: Name of the parameter in the module that was sharded.
        cut: Which rows each rank has.
        bundle: The weights that move with it.
        sharding: All sharded weights of the model.
    """

    is_distributed_weight = True

    key: str
    cut: Layout
    bundle: Bundle
    sharding: Sharding

    @classmethod
    def of(cls, shard: Tensor, position: int, bundle: Bundle, sharding: Sharding) -> ShardedWeight:
        """The parameter for one member of a bundle."""
        self = cls(shard.detach(), requires_grad=shard.requires_grad)
        self.key = bundle.members[position].name
        self.cut = bundle.members[position].layout
        self.bundle = bundle
        self.sharding = sharding
        return self

    @property
    def state(self) -> State:
        """What it is doing, and so what memory it takes."""
        return self.bundle.state

    @property
    def shard(self) -> Tensor:
        """The rows of this rank as a plain tensor, which shares their memory."""
        return super().detach()

    def detach(self) -> Tensor:
        """The rows of this rank, with the knowledge of which rows they are: for checkpoints."""
        return ShardView.of(self.shard, self.cut, self.sharding.channel.rank)

    def materialize_group_for_forward(self) -> list[Tensor]:
        """Give the whole weights of the group, readable along rows.

        Raises:
            PeerError: Another rank failed or is gone.
        """
        return self.sharding.gather(self.bundle, Usage.ROWWISE)

    def materialize_group_for_backward(self) -> list[Tensor]:
        """Give them again, readable along columns.

        Raises:
            PeerError: Another rank failed or is gone.
        """
        return self.sharding.gather(self.bundle, Usage.COLUMNWISE)

    def finalize_group_grads(self, wgrads: Any) -> list[Tensor | None]:
        """Reduce whole gradients to those of the shards; give what autograd receives.

        Raises:
            PeerError: Another rank failed or is gone.
        """
        grads = [wgrads] if isinstance(wgrads, Tensor) or wgrads is None else list(wgrads)
        fused = any(getattr(w, "main_grad", None) is not None for w in self.bundle.weights)
        return self.sharding.reduce(self.bundle, grads, fused=fused)

    def grad_buffer(self) -> Tensor:
        """Fresh memory of the shape of the whole weight, for its gradient.

        Raises:
            ConfigError: There is no ``main_grad`` that its reduction could be added to.
        """
        if getattr(self, "main_grad", None) is None:
            raise ConfigError(
                "fuse_wgrad_accumulation adds the gradient of a shard to weight.main_grad, and "
                f"{self.key} has none; set weight.main_grad = torch.zeros(weight.shape)"
            )
        leases = self.sharding.channel.leases
        return leases.lend(self.cut.shape, self.dtype, self.device)

    def add_gradient(self, share: Tensor) -> None:
        """Add a reduced gradient where gradients of this weight go."""
        main_grad = getattr(self, "main_grad", None)
        if main_grad is not None:
            main_grad.add_(share)
            if hasattr(self, "grad_added_to_main_grad"):
                self.grad_added_to_main_grad = True
        elif self.grad is None:
            self.grad = share.to(self.dtype)
        else:
            self.grad += share

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.sharding, memo)  # which says why not

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.sharding.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        rank = self.sharding.channel.rank
        start, end = self.cut.cuts[rank : rank + 2]
        return (
            f"ShardedWeight({self.key}, rows {start} to {end} of {tuple(self.cut.shape)}, "
            f"{self.dtype}, {self.state.value})"
        )


def sharded_weights(module: nn.Module) -> dict[str, ShardedWeight]:
    """The sharded weights of a module by name."""
    return {n: p for n, p in module.named_parameters() if isinstance(p, ShardedWeight)}
