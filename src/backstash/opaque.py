"""What ``torch.compile`` runs as it is, as one opaque piece between what it compiles.

``torch.compiler.disable`` says that of a function, but to call it imports the whole compiler,
which takes as long as importing torch, and most programs never compile.  So it is asked only
where the compiler is at work.  Until then the function looks to a tracer as if it had been:

- One that comes to a call of it does not look into it: it knows such functions by an attribute.
- One that is to begin with it does not either: it passes over what lies in files of its own, and
  this is said to lie in one.

Where the function runs between two compiled pieces torch's own wrapper calls it, so that nothing
that it calls is compiled.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch._compile

Opaque = TypeVar("Opaque", bound=Callable[..., Any])

_frames: Any = torch._C._dynamo.eval_frame  # pyright: ignore[reportAttributeAccessIssue]
# A name in the file in which torch has its own functions that ask the compiler late.
_PASSED_OVER = f"{torch._compile.__file__}/backstash"


def opaque(*, reason: str) -> Callable[[Opaque], Opaque]:
    """Decorate a function that ``torch.compile`` is to run as it is.

    Args:
        reason: Why; torch repeats it where ``fullgraph=True`` allows no such piece.
    """

    def decorate(function: Opaque) -> Opaque:
        # No lambda: it would be traced.
        disable = functools.partial(torch.compiler.disable, function, reason=reason)
        if "torch._dynamo" in sys.modules or not hasattr(_frames, "get_eval_frame_callback"):
            return cast("Opaque", disable())
        disabled = functools.cache(disable)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if _frames.get_eval_frame_callback() in (None, False):
                return function(*args, **kwargs)
            return disabled()(*args, **kwargs)

        marked: Any = run
        marked._torchdynamo_disable = True
        marked._torchdynamo_disable_msg = reason
        marked.__code__ = marked.__code__.replace(co_filename=_PASSED_OVER)
        return marked

    return decorate
