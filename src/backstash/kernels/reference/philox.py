"""Random bytes that depend only on a seed and on where they are used: Philox 4x32, 10 rounds.

The generator turns a counter and a key into 128 bits, sixteen bytes.  The counter is the
number of a block of sixteen values, which stream of them it is, and an offset; the key is
the seed.  So any machine, and any division of the work, draws the same bytes.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_ROUNDS = 10


def draw_seed(device: torch.device) -> Tensor:
    """A fresh seed and offset, int64 ``(2,)``, from the device's own generator.

    Drawn on the device, so that a captured graph draws anew each time it is replayed.
    """
    largest = torch.iinfo(torch.int64).max
    return torch.randint(0, largest, (2,), dtype=torch.int64, device=device)


def random_bytes(seed: Tensor, blocks: int, stream: int) -> Tensor:
    """Sixteen random bytes ``(blocks, 16)``, as int64, for each block.

    Args:
        seed: Int64 ``(2,)`` on the device: the key, and the upper half of the counter.
        blocks: How many blocks there are; their numbers are the lower word of the counter.
        stream: The word above it: another stream has other bytes.
    """
    key, offset = seed[0], seed[1]
    block_N = torch.arange(blocks, device=seed.device)
    counter = (
        block_N & _LOW,
        torch.full_like(block_N, stream),
        (offset & _LOW).expand(blocks),
        (offset >> 32 & _LOW).expand(blocks),
    )
    words_NW = torch.stack(philox(counter, (key & _LOW, key >> 32 & _LOW)), dim=-1)
    shifts_B = torch.arange(0, 32, 8, device=seed.device)
    return (words_NW[..., None] >> shifts_B & 0xFF).flatten(1)


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words for each counter; words are int64 from 0 to 2^32 - 1."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(_ROUNDS):
        (high0, low0), (high2, low2) = _product(c0, _MULTIPLIERS[0]), _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _KEY_STEPS[0] & _LOW, k1 + _KEY_STEPS[1] & _LOW
    return c0, c1, c2, c3


def _product(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Upper and lower word of a product, by halves: the whole would not fit into an int64."""
    lower = word * (factor & 0xFFFF)
    upper = word * (factor >> 16) + (lower >> 16)
    return upper >> 16, (upper << 16 | lower & 0xFFFF) & _LOW
