"""What a module asks of a weight that is only a shard here.

A module keeps its parameter, and around each matmul asks two questions.  *What is the
full weight?* just before it reads one (once in forward, once in backward), and *what do
I do with this full gradient?* just after it has made one.  A weight that answers them
may hold one shard of itself, or live in another memory, or arrive in low precision; the
module does not know.  A plain tensor answers nothing and is used as it is.

Words: the **group** is the list of weights that move together, its **leader** is the
first of them.  Only the leader is asked, once, for the whole group.  A group of one
answers with a tensor or with a list of one tensor, as it likes.

The marker is an attribute and not a base class, so that a provider written for another
library plugs in.  Asking a plain tensor costs one attribute look-up; ``isinstance`` of a
runtime-checkable protocol costs ten times that, and this is on the path of every module.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from backstash.errors import DtypeError, ShapeError


@runtime_checkable
class DistributedWeight(Protocol):
    """A ``torch.Tensor`` subclass that gathers itself before a matmul and scatters its gradient."""

    is_distributed_weight: bool

    def materialize_group_for_forward(self) -> Any:
        """Give the full weight, or the list of the group's, for the forward matmul."""
        ...

    def materialize_group_for_backward(self) -> Any:
        """Give it again for the backward matmuls; may start to prefetch the next one."""
        ...

    def finalize_group_grads(self, wgrads: Any) -> Any:
        """Take the full gradient (a list for a group) and return what autograd receives."""
        ...

    def grad_buffer(self) -> Tensor:
        """Give the buffer, of the full shape, that the next full gradient is written to."""
        ...


def is_distributed_weight(weight: object) -> bool:
    """Whether ``weight`` carries the marker.

    Raises:
        TypeError: it does and is no ``torch.Tensor``: autograd could not give it a gradient.
            Or it is one of no class of its own: saving tells weights by their class.
    """
    if not getattr(weight, "is_distributed_weight", False):
        return False
    if isinstance(weight, Tensor) and type(weight) is not Tensor:
        return True
    raise TypeError(
        "a distributed weight must be a torch.Tensor subclass, got "
        f"{type(weight).__name__} with is_distributed_weight set; derive it from "
        "torch.nn.Parameter or torch.Tensor"
    )


def materialize_weight_for_forward(weights: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Give the full weights that the forward matmul reads; plain ones come back unchanged."""
    group = _as_group(weights)
    if not group or not is_distributed_weight(group[0]):
        return group
    leader: Any = group[0]
    return _full_weights(leader.materialize_group_for_forward(), group)


def materialize_weight_for_backward(weights: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Give the full weights that the backward matmuls read; plain ones come back unchanged."""
    group = _as_group(weights)
    if not group or not is_distributed_weight(group[0]):
        return group
    leader: Any = group[0]
    return _full_weights(leader.materialize_group_for_backward(), group)


def finalize_weight_grads(
    weights: Tensor | Sequence[Tensor], wgrads: Tensor | Sequence[Tensor | None] | None
) -> list[Tensor | None]:
    """Hand the full gradients over and give back what autograd receives, one a weight.

    A provider may answer with gradients of its shards, with a dummy, or with ``None``
    when the gradient already is where it should be.  Gradients of plain weights come
    back unchanged.

    Raises:
        ShapeError: There are not as many gradients as weights, or answers as weights.
    """
    group = _as_group(weights)
    grads = [wgrads] if isinstance(wgrads, Tensor | NoneType) else list(wgrads)
    if len(grads) != len(group):
        raise ShapeError(
            f"finalize_weight_grads needs one gradient (or None) for each of the {len(group)} "
            f"weights, got {len(grads)}; give both lists of the same group"
        )
    if not group or not is_distributed_weight(group[0]):
        return grads
    leader: Any = group[0]
    answer = leader.finalize_group_grads(grads[0] if len(grads) == 1 else grads)
    if answer is None:
        return [None] * len(group)
    if isinstance(answer, Tensor):
        answer = [answer]
    return _checked(list(answer), group, "finalize_group_grads", "gradient (or None)")


def _as_group(weights: Tensor | Sequence[Tensor]) -> list[Tensor]:
    # No isinstance with an abstract class where it can be helped: this is on every module's path.
    if isinstance(weights, list):
        return weights
    if isinstance(weights, Tensor):
        return [weights]
    if isinstance(weights, Sequence):
        return list(weights)
    # A marked object that is no tensor comes here too: is_distributed_weight names it.
    if not is_distributed_weight(weights):
        raise DtypeError(
            f"a weight must be a torch.Tensor, or a list of them, got {type(weights).__name__}; "
            "give the parameters of the module"
        )
    return [weights]


def _full_weights(answer: Any, group: list[Tensor]) -> list[Tensor]:
    # A tensor can be iterated too, so it is asked for before a list is made of the answer.
    full = [answer] if isinstance(answer, torch.Tensor) else list(answer or ())
    return _checked(full, group, "materialize_group_for_*", "full weight")


def _checked(answer: list, group: list[Tensor], method: str, what: str) -> list:
    if len(answer) != len(group):
        raise ShapeError(
            f"{method} of {type(group[0]).__name__} must answer with one {what} for each of the "
            f"{len(group)} weights of its group, got {len(answer)}; the leader answers for all"
        )
    return answer
