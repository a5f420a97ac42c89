"""Launches of kernels that are compiled already, without asking Triton again which one it is.

For every launch Triton looks at each argument, each option and the environment, and writes down
the layouts in words, to find what it has compiled for such arguments.  That takes several times
as long as the launch.  Here the same is found by a key of all that a kernel may be compiled for:
of a tensor its dtype and whether its address is whole units of 16 bytes; of a whole number
whether it is one, whole sixteens, or more than 32 bits; of a descriptor its dtype and its block;
constants as they are.  The first launch with a key is Triton's own, and so is each one while
somebody watches launches by Triton's hooks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from backstash.device import current_gpu

_ALIGNED_BYTES = 16
_WHOLE = 16
_LARGE = 2**31


class Launcher:
    """A kernel of Triton or Gluon, and what was compiled of it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._is_interpreted = knobs.runtime.interpret
        # As many as there are kinds of arguments, each of which Triton keeps a kernel for as well.
        self._known: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}

    def __call__(self, programs: int, *args: Any, **constants: Any) -> None:
        """Launch so many programs on the current device.

        ``args`` are the kernel's first parameters, ``constants`` the others and options.
        """
        if self._is_interpreted or torch.compiler.is_compiling():
            self.kernel[(programs,)](*args, **constants)
            return
        device = current_gpu()
        kinds, given = _looked_at(args)
        key = (device, *kinds, *constants.items())
        known = self._known.get(key)
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        is_watched = getattr(enter, "calls", enter) or getattr(leave, "calls", leave)
        if known is None or is_watched:
            self._known[key] = self._ask(programs, args, constants)
            return
        compiled, last = known
        active: Any = driver.active
        stream = active.get_current_stream(device)
        described = compiled.function, compiled.packed_metadata, None, None, None
        compiled.run(programs, 1, 1, stream, *described, *given, *last)

    def _ask(self, programs: int, args: Any, constants: dict[str, Any]) -> tuple[Any, list[Any]]:
        """Triton's own launch, and what it launched."""
        compiled = self.kernel[(programs,)](*args, **constants)
        return compiled, [constants[name] for name in self.kernel.arg_names[len(args) :]]


def _looked_at(args: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """Of each argument what a kernel may be compiled for, and what the launch is given.

    That is the address of a tensor: Triton would ask for it again, and the driver what it is.  One
    that is not on a GPU is of another kind, which Triton refuses.
    """
    kinds: list[Any] = []
    given: list[Any] = []
    for value in args:
        kind, mine = None, value
        if type(value) is Tensor:
            mine = value.data_ptr()
            kind = value.dtype, mine % _ALIGNED_BYTES == 0, value.is_cuda
        elif type(value) is int:
            kind = value == 1, value % _WHOLE == 0, -_LARGE <= value < _LARGE
        elif value is not None:
            kind, mine = _kind_of_others(value)
        kinds.append(kind)
        given.append(mine)
    return kinds, given


def _kind_of_others(value: Any) -> tuple[Any, Any]:
    # A descriptor says it.
    if (kind := getattr(value, "kind", None)) is not None:
        return kind, value
    if type(value) is tuple:
        kinds, given = _looked_at(value)
        return tuple(kinds), tuple(given)
    if isinstance(value, Tensor):  # a parameter, say
        address = value.data_ptr()
        return (value.dtype, address % _ALIGNED_BYTES == 0, value.is_cuda), address
    # Any float is like any other; what is left is a constant.
    return (float if type(value) is float else value), value
