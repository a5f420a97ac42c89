"""One name, two programs: an operation runs as its Triton twin on a GPU, else as the reference.

Which operations have a twin is written down, one line each, in ``backstash.kernels``; nothing
is tried and caught.  A twin is bound when the package is imported: where torch was built
without CUDA, or Triton is not there, the name *is* the reference and a call costs nothing
more.  Where both are there, a call asks for the device of its first tensor.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")

#: Whether twins can be built at all: Triton compiles for the CUDA that torch was built with.
HAS_TWINS = torch.version.cuda is not None and importlib.util.find_spec("triton") is not None
#: The first compute capability that casts to float8 in hardware, as the twins do.
FIRST_CAPABILITY = (8, 9)


def by_device(reference: Callable[P, R], file: str) -> Callable[P, R]:
    """Bind ``reference`` and the function of its name in ``backstash.kernels.{file}``.

    The operation's first argument is a tensor, given by position; it says where to run.
    """
    if not HAS_TWINS:
        return reference
    twin = getattr(importlib.import_module(f"backstash.kernels.{file}"), reference.__name__)
    return choosing(reference, twin)


def choosing(reference: Callable[P, R], twin: Callable[P, R]) -> Callable[P, R]:
    """The operation that asks its first tensor which of the two to run."""

    @functools.wraps(reference)
    def operation(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not takes_twins(first):
            return reference(first, *args, **kwargs)  # pyright: ignore[reportCallIssue]
        # Triton launches on the current device, whatever device its arguments are on.
        with torch.cuda.device(first.device):
            return twin(first, *args, **kwargs)  # pyright: ignore[reportCallIssue]

    return cast("Callable[P, R]", operation)


def takes_twins(x: torch.Tensor) -> bool:
    """Say if Triton kernels run on the device that ``x`` is on."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= FIRST_CAPABILITY
