"""What can be chosen about sharding, as a frozen value."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import torch

from backstash.errors import ConfigError
from backstash.weights.layout import Split


class Reduce(enum.Enum):
    """What the gradient of a weight is made of those of the ranks."""

    MEAN = "mean"
    SUM = "sum"


class Delivery(enum.Enum):
    """How the gradient of a shard gets to its parameter."""

    #: Added to ``.grad`` behind autograd's back, at the latest when backward has ended, so
    #: that its reduction runs beside the rest of backward.
    OVERLAPPED = "overlapped"
    #: Waited for and returned to autograd, for wrappers such as DDP that listen there.
    AT_ONCE = "at_once"


class Carrier(enum.Enum):
    """What brings the parts of a weight together in high precision."""

    #: The process group.
    COLLECTIVE = "collective"
    #: The copy engines of GPUs that reach each other's memory; elsewhere the process group.
    PEERS = "peers"


class Others(enum.Enum):
    """What becomes of the gradients of parameters that every rank keeps whole."""

    REDUCE = "reduce"  # like those of the shards, when backward has ended
    LEAVE = "leave"  # somebody else does


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """How weights are cut, and how their gradients are reduced.

    Attributes:
        split: Where weights of several experts are cut: ``"experts"``, ``"rows"``, or ``"auto"``.
        reduce: ``"mean"`` or ``"sum"`` over the ranks.
        accumulate: The dtype gradients are added up in, such as ``torch.float32``; None leaves
            it to the collective, which adds in their own.
        delivery: ``"overlapped"`` or ``"at_once"``.
        others: ``"reduce"`` or ``"leave"`` the gradients of all other parameters.
        carrier: ``"collective"`` or ``"peers"``.
        together_bytes: The most bytes of whole weights that move in one collective, if they are
            used one after the other; larger ones move alone.

    Raises:
        ConfigError: A field is not one of these.
    """

    split: Split | str = Split.AUTO
    reduce: Reduce | str = Reduce.MEAN
    accumulate: torch.dtype | None = None
    delivery: Delivery | str = Delivery.OVERLAPPED
    others: Others | str = Others.REDUCE
    carrier: Carrier | str = Carrier.COLLECTIVE
    together_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        for name, kind in _WORDS.items():
            object.__setattr__(self, name, _one_of(kind, name, getattr(self, name)))
        dtype = self.accumulate
        if dtype is not None and not (
            isinstance(dtype, torch.dtype) and dtype in (torch.float32, torch.float64)
        ):
            raise ConfigError(
                f"accumulate must be torch.float32, torch.float64 or None, got {dtype!r}"
            )
        if not isinstance(self.together_bytes, int) or self.together_bytes < 0:
            raise ConfigError(
                f"together_bytes is a number of bytes, zero or more, got {self.together_bytes!r}"
            )

    def divisor(self, ranks: int) -> int:
        """What a sum over the ranks is divided by."""
        return 1 if self.reduce is Reduce.SUM else ranks


_WORDS: dict[str, type[enum.Enum]] = {
    "split": Split,
    "reduce": Reduce,
    "delivery": Delivery,
    "others": Others,
    "carrier": Carrier,
}


def _one_of(kind: type[enum.Enum], name: str, value: Any) -> enum.Enum:
    try:
        return kind(value)
    except ValueError:
        words = [member.value for member in kind]
        raise ConfigError(f"{name} must be one of {words}, got {value!r}") from None
