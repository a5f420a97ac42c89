"""Mixture of experts: router, dispatcher, experts, combine, each replaceable.

Files: ``router`` decides where tokens go, ``losses`` keep it balanced, ``dispatch`` moves
rows, ``layer`` puts them together.
"""

from backstash.moe.dispatch import Buffer, Dispatched, Dispatcher, Local, combine_rows
from backstash.moe.layer import MoE
from backstash.moe.losses import Losses, attach_loss
from backstash.moe.router import Router, RouterConfig, Routing

__all__ = [
    "Buffer",
    "Dispatched",
    "Dispatcher",
    "Local",
    "Losses",
    "MoE",
    "Router",
    "RouterConfig",
    "Routing",
    "attach_loss",
    "combine_rows",
]
