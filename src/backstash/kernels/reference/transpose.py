"""Codes transposed, for a matmul that reads them along the other dimension.

Float8 matrix units read both operands along the dimension they add up over.  Codes whose
scale does not depend on a direction, or that are wanted for one product only, are transposed
instead of quantized again, at a quarter to a third of the bytes.

Four-bit codes lie in pairs, two neighbours of a row in a byte with the even column in its low
half; transposed, two neighbours of a column share one.  So the tiles of a 2-D NVFP4 weight, whose
scales are the same along both directions, can be read along the other one.

Letters: M rows, K columns, G matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backstash.errors import ShapeError

#: Two codes of four bits in a byte.
PAIRS = torch.float4_e2m1fn_x2


def transpose_codes(codes: Tensor) -> Tensor:
    """Codes ``(M, K)`` as ``(K, M)``, or ``(G, M, K)`` as ``(G, K, M)``, in fresh memory.

    Args:
        codes: ``uint8`` or any 8-bit float, with any strides; its dtype is kept.  As
            ``float4_e2m1fn_x2`` they are pairs, ``(M, K / 2)`` bytes, and so is the result,
            ``(K, ceil(M / 2))`` bytes: the last half of each is zero where M is odd.

    Raises:
        ShapeError: There are not two or three dimensions, or a code is more than a byte.
    """
    check_codes(codes)
    if codes.dtype is PAIRS:
        return _transposed_pairs(codes.view(torch.uint8)).view(PAIRS)
    # Bytes: not every device copies every 8-bit float.
    transposed = codes.view(torch.uint8).mT.clone(memory_format=torch.contiguous_format)
    return transposed.view(codes.dtype)


def _transposed_pairs(pairs: Tensor) -> Tensor:
    codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2).mT
    codes = torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2))
    return (codes[..., ::2] | codes[..., 1::2] << 4).contiguous()


def check_codes(codes: Tensor) -> None:
    """Refuse what is no matrix of one-byte codes, and no batch of such matrices."""
    if codes.ndim not in (2, 3) or codes.dtype.itemsize != 1:
        raise ShapeError(
            f"transpose_codes needs one-byte codes (M, K) or (G, M, K), got {codes.dtype} "
            f"{tuple(codes.shape)}; pass the codes of one direction, reshaped to rows"
        )
