"""Launches of kernels that are compiled already, without asking Triton again which one it is.

For every launch Triton looks at each argument, each option and the environment, and writes down
the layouts in words, to find what it has compiled for such arguments.  That takes longer than the
launch.  Here the same is found by a key of all that a kernel may be compiled for: of a tensor its
dtype and whether its address is whole units of 16 bytes; of a number whether it is one, whole
sixteens, or more than 32 bits; of a descriptor its dtype and its block; constants as they are.
The first launch with a key is Triton's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ALIGNED_BYTES = 16
_WHOLE = 16
_LARGE = 2**31


class Launcher:
    """A kernel of Triton or Gluon, and what was compiled of it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        # As many as there are kinds of arguments, each of which Triton keeps a kernel for as well.
        self._known: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}

    def __call__(self, programs: int, *args: Any, **constants: Any) -> None:
        """Launch so many programs on the current device.

        ``args`` are the kernel's first parameters, ``constants`` the others and options.
        """
        # Where there is no GPU, an interpreter runs.
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        key = (device, *map(_kind, args), *constants.items())
        known = self._known.get(key)
        if known is not None:
            compiled, last = known
            compiled[programs, 1, 1](*args, *last)
            return
        compiled = self.kernel[(programs,)](*args, **constants)
        # An interpreter compiles nothing.
        if compiled is not None:
            names = self.kernel.arg_names[len(args) :]
            self._known[key] = compiled, [constants[name] for name in names]


def _kind(value: Any) -> Any:
    """What a kernel may be compiled for."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % _ALIGNED_BYTES == 0
    if type(value) is tuple:
        return tuple(map(_kind, value))
    if type(value) is int:
        return value == 1, value % _WHOLE == 0, -_LARGE <= value < _LARGE
    # A descriptor says it; what is left is None or a constant.
    return getattr(value, "kind", value)
