"""How a launch that moves pages is cut up: into which parts, for how many programs.

A part is what a program moves at once.  Copying is fastest where few large programs take large
parts; quantizing has work to do between a reading and a writing, and wants many small ones.  A
model launches the same few shapes again and again, so each is thought of once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from backstash.device import processor_count
from backstash.errors import LayoutError
from backstash.kernels.moves import is_left
from backstash.kernels.reference.cast import MX_BLOCK
from backstash.kernels.reference.mx_pages import mx_page_blocks
from backstash.kernels.reference.pages import MOST_BUFFERS, page_payload
from backstash.kernels.sizes import ceil_div


class Footprint(NamedTuple):
    """What a launch takes of the device."""

    warps: int
    programs: int
    """Of each processor."""
    registers: int
    """Of a thread; the compiler takes no more, or fewer programs would fit."""
    part_bytes: int
    """Bytes that a program copies at once, a buffer of bytes, at most."""
    asks: bool
    """Does a program ask for its next part, or take them in turn with the others?"""


# Few large programs: what is read and written at one time is close together.
COPYING = Footprint(warps=16, programs=2, registers=64, part_bytes=32768, asks=True)
# Between reading a block and writing it there is work to do, so more of them must be under way.
QUANTIZING = Footprint(warps=4, programs=12, registers=40, part_bytes=4096, asks=False)
_WARP_BYTES = 32 * 16
_VECTOR = 16


class LaunchShape(NamedTuple):
    """How a launch cuts its buffers up, in elements of each, and among how many programs."""

    footprint: Footprint
    payloads: tuple[int, ...]
    parts: tuple[int, ...]
    programs: int
    in_words: bool
    left: tuple[int, ...]
    """Bytes of a page where whole ones are left as moves, else 0."""

    @classmethod
    def of(cls, buffers: Sequence[Tensor], page_bytes: int, *, leaving: bool) -> LaunchShape:
        """The shape of a launch that moves ``buffers``, or leaves some of that to matmuls.

        Raises:
            LayoutError: They are more than one launch can have, or none.
        """
        if not 1 <= len(buffers) <= MOST_BUFFERS:
            raise LayoutError(
                f"one launch moves 1 to {MOST_BUFFERS} buffers, got {len(buffers)}; split them "
                "into launches"
            )
        # Pages are fit for vectors: one is a power of two from 16 bytes up.
        kinds = [(b.dtype, b.numel(), b.data_ptr() % _VECTOR == 0) for b in buffers]
        return _shape_of(tuple(kinds), page_bytes, _processors(buffers[0].device), leaving=leaving)


#: Of a buffer: what is in it, how many, and whether it is at a vector's address.
_Kind = tuple[torch.dtype, int, bool]


# A model launches the same few shapes again and again.
@functools.lru_cache(maxsize=1024)
def _shape_of(
    kinds: tuple[_Kind, ...], page_bytes: int, processors: int, *, leaving: bool
) -> LaunchShape:
    is_copy = all(dtype is torch.uint8 for dtype, _, _ in kinds)
    footprint = COPYING if is_copy else QUANTIZING
    at_once = processors * footprint.programs
    in_words = all(aligned for _, _, aligned in kinds)
    # At least a vector, or a few bytes, for each thread.
    least = footprint.warps * _WARP_BYTES
    part_bytes = footprint.part_bytes if in_words else least
    # Less where there would not be one for every program.
    total = sum(count * dtype.itemsize for dtype, count, _ in kinds)
    while part_bytes > least and total < at_once * part_bytes:
        part_bytes //= 2
    parts = [_part(dtype, page_bytes, part_bytes) for dtype, _, _ in kinds]
    most = sum(ceil_div(count, part) for (_, count, _), part in zip(kinds, parts, strict=True))
    return LaunchShape(
        footprint=footprint,
        payloads=tuple([page_payload(dtype, page_bytes) for dtype, _, _ in kinds]),
        parts=tuple(parts),
        programs=max(1, min(most, at_once)),
        in_words=in_words,
        left=tuple(
            [
                page_bytes
                if leaving and is_left(dtype, count, page_bytes, is_aligned=aligned)
                else 0
                for dtype, count, aligned in kinds
            ]
        ),
    )


def _part(dtype: torch.dtype, page_bytes: int, part_bytes: int) -> int:
    """Elements of a part: bytes, or the values of as many blocks as a program takes at once."""
    if dtype is torch.uint8:
        return min(page_bytes, part_bytes)
    return mx_page_blocks(page_bytes)[1] * MX_BLOCK


def _processors(device: torch.device) -> int:
    return processor_count(device) if device.type == "cuda" else 1  # Triton's interpreter
