"""MXFP8: blocks of 32 E4M3 codes with a shared power of two (E8M0), as in the OCP
microscaling specification; the exponent is rounded up, so no code saturates.

Scaling by a power of two is exact: the cast is the only rounding.  Blocks are lines of 32, or
tiles of 32 by 32, meant for weights (:mod:`backstash.formats.blocks`).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from backstash import kernels
from backstash.formats.blocks import BlockFormat, Dequantizers, Quantizers
from backstash.formats.format import Code

_QUANTIZERS = Quantizers(
    rows=kernels.quantize_mx_rows,
    columns=kernels.quantize_mx_columns,
    tiles=kernels.quantize_mx_tiles,
    both=kernels.quantize_mx_both,
)
_DEQUANTIZERS = Dequantizers(
    rows=kernels.dequantize_mx_rows,
    columns=kernels.dequantize_mx_columns,
    tiles=kernels.dequantize_mx_tiles,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8Format(BlockFormat):
    """Blocks of 32 along K (rowwise) or along M (columnwise), or tiles with ``two_d``."""

    name: ClassVar[str] = "mxfp8"
    block: ClassVar[int] = kernels.MX_BLOCK
    scales: ClassVar[str] = "scales"
    scale_dtype: ClassVar[torch.dtype] = torch.uint8

    @property
    def tolerance(self) -> tuple[float, float]:
        return Code.E4M3.tolerance

    def quantizers(self) -> Quantizers:
        return _QUANTIZERS

    def dequantizers(self) -> Dequantizers:
        return _DEQUANTIZERS
