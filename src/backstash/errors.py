"""One exception class per kind of mistake.

A message says what was wanted, what came, and what to do about it.  Every class derives
from :class:`BackstashError`, which is a ``ValueError``: code that guards a call with
``except ValueError`` keeps working.  A class that has a counterpart in Python or PyTorch
derives from that too, so that ``except RuntimeError`` around a backward pass catches an
in-place change to a value we kept just as it catches autograd's own.

These are raised, never asserted: they are there under ``python -O`` as well.
"""


class BackstashError(ValueError):
    """Raised only through its subclasses; catch it to catch every mistake we report."""


class ShapeError(BackstashError):
    """Raised when a tensor has the wrong number of dimensions or a wrong size in one."""


class DtypeError(BackstashError):
    """Raised when a tensor has a dtype that the operation is not defined for."""


class DeviceError(BackstashError):
    """Raised when a tensor is on the wrong device, or this machine lacks the one asked for."""


class LayoutError(BackstashError):
    """Raised when bytes are not arranged as needed: strides, blocks, or no valid prefix."""


class RecipeError(BackstashError):
    """Raised when a recipe, a format or an option of one is unknown or does not fit a role."""


class ConfigError(BackstashError):
    """Raised when an option has a value, or two options have a combination, that means nothing."""


class DataError(BackstashError):
    """Raised when training text or a tokenizer cannot be read, or holds too little to use."""


class CheckpointError(BackstashError):
    """Raised when a checkpoint is incomplete, damaged, or was written for another model."""


class ModifiedError(BackstashError, RuntimeError):
    """Raised in backward when a value kept by reference was changed in place after forward.

    Autograd reports the same mistake as a ``RuntimeError``, and so this is one.
    """


class CompileError(BackstashError, RuntimeError):
    """Raised while ``torch.compile`` traces something that only works in eager mode."""


class PeerError(BackstashError, RuntimeError):
    """Raised when another process of the group has failed, has gone, or runs another program."""


class SecondOrderError(BackstashError, RuntimeError):
    """Raised when a derivative of a derivative is asked of a layer that has only the first."""


class RecomputeError(BackstashError, RuntimeError):
    """Raised when a checkpointed region does something else when it is run again."""


class NothingSavedError(BackstashError, AttributeError):
    """Raised when saved values are asked of a context that holds none, or no longer does."""


class UnsupportedOpError(BackstashError, NotImplementedError):
    """Raised when an operation has no meaning for a quantized or grouped tensor, or for a layer."""
