"""Codes the other way round: a matmul that wants its lines along the other dimension.

Float8 matrix units read both operands along the dimension they add up over.  Codes whose
scale does not depend on a direction, or that are wanted for one product only, are turned
instead of quantized again, at a quarter to a third of the bytes.

Letters: M rows, K columns, G matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backstash.errors import ShapeError


def transpose_codes(codes: Tensor) -> Tensor:
    """One-byte codes ``(M, K)`` as ``(K, M)``, or ``(G, M, K)`` as ``(G, K, M)``, in fresh memory.

    Args:
        codes: ``uint8`` or any 8-bit float, with any strides; its dtype is kept.

    Raises:
        ShapeError: There are not two or three dimensions, or a code is more than a byte.
    """
    check_codes(codes)
    # Bytes: not every device copies every 8-bit float.
    turned = codes.view(torch.uint8).mT.clone(memory_format=torch.contiguous_format)
    return turned.view(codes.dtype)


def check_codes(codes: Tensor) -> None:
    """Refuse what is no matrix of one-byte codes, and no batch of such matrices."""
    if codes.ndim not in (2, 3) or codes.dtype.itemsize != 1:
        raise ShapeError(
            f"transpose_codes needs one-byte codes (M, K) or (G, M, K), got {codes.dtype} "
            f"{tuple(codes.shape)}; pass the codes of one direction, reshaped to rows"
        )
