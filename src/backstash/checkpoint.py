"""Recompute a part of the forward in backward instead of saving what it needs.

This is ``torch.utils.checkpoint`` without a mode to choose.  That the recomputation sees the
recipe, the scales and the experts of its forward is the work of :mod:`backstash.recompute`,
which knows torch's own function too: either may be used around our modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from backstash.errors import ConfigError


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function(*args, **kwargs)`` and save its inputs only.

    Gradients are bit-equal to those of a plain call, also under a low-precision recipe whose
    ``autocast`` has been left before backward, under delayed scaling, and with a router
    whose choices nearly tie.  ``preserve_rng_state``, ``context_fn``, ``determinism_check``,
    ``early_stop`` and ``debug`` are those of ``torch.utils.checkpoint``; keyword arguments of
    these names do not reach ``function``.

    Raises:
        ConfigError: ``function`` cannot be called, or the reentrant mode is asked for, which
            takes no keyword arguments and loses gradients of inputs inside containers.
    """
    if not callable(function):
        raise ConfigError(
            f"checkpoint needs a function or a module to call, got {function!r}; pass its "
            "arguments after it, not its result"
        )
    if kwargs.pop("use_reentrant", False):
        raise ConfigError(
            "backstash.checkpoint does not run reentrantly; leave use_reentrant out, or call "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=True), which works as well"
        )
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)
