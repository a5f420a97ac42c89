"""What ``torch.compile`` runs as it is, as one opaque piece between what it compiles.

``torch.compiler.disable`` does that to a function, but calling it imports the whole compiler,
which takes as long as importing torch, and most programs never compile.  Torch has no public way
to mark a function without that import.  So ``disable`` is called only once the compiler is at
work, and until then the function has the two marks by which the tracer knows a disabled one:

- Where it traces a call of the function, it finds the attribute that ``disable`` sets, and does
  not trace into it.
- Where torch itself calls the function, so that tracing would begin with it, it looks at the file
  of the code: code in torch's own compiler files is skipped, and this claims to be in one.

Where the function runs between two compiled pieces, torch's own wrapper calls it, so that nothing
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
# The tracer skips by prefix: this is below the file of torch's own late-importing wrappers.
_SKIPPED_FILE = f"{torch._compile.__file__}/backstash"


def is_compiled_around() -> bool:
    """Is this code run as it is, by a program that ``torch.compile`` traces around it?"""
    return _frames.get_eval_frame_callback() not in (None, False)


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
            # Asked here: a function that this called would be compiled.
            if _frames.get_eval_frame_callback() in (None, False):
                return function(*args, **kwargs)
            return disabled()(*args, **kwargs)

        marked: Any = run
        marked._torchdynamo_disable = True
        marked._torchdynamo_disable_msg = reason
        marked.__code__ = marked.__code__.replace(co_filename=_SKIPPED_FILE)
        return marked

    return decorate
