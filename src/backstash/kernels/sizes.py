"""Sizes of launches: how many blocks cover something, and the power of two that holds it.

Triton has both, as functions that kernels can call as well.  What makes that possible takes
microseconds on the host, of which a layer has dozens of calls.
"""

from __future__ import annotations


def ceil_div(count: int, block: int) -> int:
    """How many blocks cover ``count``."""
    return -(-count // block)


def next_power_of_2(count: int) -> int:
    """The smallest power of two that is at least ``count``, and at least one."""
    return 1 << max(count - 1, 0).bit_length()
