"""The paged stash: of what is saved for backward, keep only the rows that are there.

Files, from the handler down to the bytes: ``stash`` decides which values go, ``batch`` is what
one node saves together, ``claimed`` what it computes in pages, ``region`` which bytes a tensor
needs, ``foresight`` guesses what is asked for next, ``pool`` holds the pages, ``packing`` says
how values lie in them, ``admission`` who may stash, ``sizing`` how large the pool should be,
``streams`` where copies run; ``captured_step`` puts it all in a CUDA graph.
"""

from backstash.stash.admission import Policy
from backstash.stash.batch import Tail
from backstash.stash.captured_step import CapturedStep, Patience, StepState
from backstash.stash.pool import PagePool
from backstash.stash.sizing import Sizing, pages_for
from backstash.stash.stash import Stash, Take
from backstash.stash.statistics import Statistics

__all__ = [
    "CapturedStep",
    "PagePool",
    "Patience",
    "Policy",
    "Sizing",
    "Stash",
    "Statistics",
    "StepState",
    "Tail",
    "Take",
    "pages_for",
]
