"""One name, two programs: an operation runs as its Triton twin on a GPU, else as the reference.

Which operations have a twin is written down, one line each, in ``backstash.kernels``; nothing
is tried and caught.  A twin is bound when the package is imported: where torch was built
without CUDA, or Triton is not there, the name *is* the reference and a call costs nothing
more.  Where both are there, a call asks for the device of its first argument; a tensor that
only stands for one while torch traces runs the reference.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

from backstash.device import capability, current_gpu

P = ParamSpec("P")
R = TypeVar("R")

#: Whether twins can be built at all: Triton compiles for the CUDA that torch was built with.
HAS_TWINS = torch.version.cuda is not None and importlib.util.find_spec("triton") is not None
#: The first compute capabilities that Triton compiles for, and that cast to float8.
ANY_GPU = (7, 5)
FLOAT8_GPU = (8, 9)


def by_device(
    reference: Callable[P, R], file: str, first_capability: tuple[int, int] = ANY_GPU
) -> Callable[P, R]:
    """Bind ``reference`` and the function of its name in ``backstash.kernels.{file}``.

    The operation's first argument, given by position, is a tensor or a sequence of some on
    one device; it says where to run.  A GPU older than ``first_capability`` runs the reference.
    """
    if not HAS_TWINS:
        return reference
    twin = getattr(importlib.import_module(f"backstash.kernels.{file}"), reference.__name__)
    return choosing(reference, twin, first_capability)


def choosing(
    reference: Callable[P, R], twin: Callable[P, R], first_capability: tuple[int, int]
) -> Callable[P, R]:
    """The operation that asks its first argument which of the two to run."""

    @functools.wraps(reference)
    def operation(first: Any, /, *args: Any, **kwargs: Any) -> Any:
        x = first if isinstance(first, torch.Tensor) else first[0]
        # Most calls are on the current device, and this runs at each of them.
        if not torch.compiler.is_compiling() and type(x) in _PLAIN and x.is_cuda:
            is_current = x.get_device() == current_gpu()
            if is_current and capability(x.device) >= first_capability:
                return twin(first, *args, **kwargs)  # pyright: ignore[reportCallIssue]
        is_here = x.is_cuda and not _has_no_memory(x)
        if not is_here or capability(x.device) < first_capability:
            return reference(first, *args, **kwargs)  # pyright: ignore[reportCallIssue]
        # Triton launches on the current device, whatever device its arguments are on.
        with torch.cuda.device(x.device):
            return twin(first, *args, **kwargs)  # pyright: ignore[reportCallIssue]

    return cast("Callable[P, R]", operation)


def _has_no_memory(x: torch.Tensor) -> bool:
    """Is this what a compiler of torch calls us with to learn which operations we do?

    Where it reads the code itself it sees the twin's launch; where it cannot, as in a method
    that plain tensors have too, it sees the operations of the reference.
    """
    kind: Any = type(x)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return False
    return kind.__torch_dispatch__ is not _NO_DISPATCH


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
# What a class has that runs operations as plain tensors do.
_NO_DISPATCH: Any = torch.Tensor.__torch_dispatch__  # pyright: ignore[reportAttributeAccessIssue]
