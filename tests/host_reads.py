"""A block of code in which no value may travel from the GPU to the host."""

import contextlib
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def no_host_reads(device: str = "cuda") -> Iterator[None]:
    """Let torch raise on everything that waits for the GPU; on another device, do nothing."""
    if device != "cuda":
        yield
        return
    with warnings.catch_warnings():
        # Torch calls the mode a prototype each time it is set.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
