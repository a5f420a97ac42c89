"""Float8 in blocks of 128, each with a float32 scale.

Inputs and gradients have blocks of 1 by 128 along what a matmul adds up over, weights tiles of
128 by 128 (:mod:`backstash.formats.blocks`).  A matmul wants lines on one side at least; tiles on
both are refused by recipes.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import torch

from backstash import kernels
from backstash.formats.blocks import BlockFormat, Dequantizers, Quantizers
from backstash.formats.format import Code, check_code, check_epsilon, check_flags


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8Block(BlockFormat):
    """Blocks of 128 along K (rowwise) or along M (columnwise), or tiles with ``two_d``.

    ``power_of_two`` scales make scaling exact; ``epsilon`` is the least magnitude taken for
    the largest of a block.
    """

    code: Code = Code.E4M3
    power_of_two: bool = True
    epsilon: float = 0.0

    name: ClassVar[str] = "float8_block"
    block: ClassVar[int] = kernels.FLOAT8_BLOCK
    scales: ClassVar[str] = "scale_inv"
    scale_dtype: ClassVar[torch.dtype] = torch.float32

    def __post_init__(self) -> None:
        super().__post_init__()
        check_code(self.code)
        check_epsilon(self.epsilon)
        check_flags(self, "power_of_two")

    @property
    def tolerance(self) -> tuple[float, float]:
        return self.code.tolerance

    def quantizers(self) -> Quantizers:
        """Those of blocks of 128, with this format's codes and scales."""
        options: dict[str, Any] = {
            "code_dtype": self.code.dtype,
            "epsilon": self.epsilon,
            "power_of_two": self.power_of_two,
        }
        return Quantizers(
            rows=functools.partial(kernels.quantize_block_rows, **options),
            columns=functools.partial(kernels.quantize_block_columns, **options),
            tiles=functools.partial(kernels.quantize_block_tiles, **options),
            both=functools.partial(kernels.quantize_block_both, **options),
        )

    def dequantizers(self) -> Dequantizers:
        """Those of blocks of 128, with this format's codes."""
        code = self.code.dtype
        return Dequantizers(
            rows=functools.partial(kernels.dequantize_block_rows, code_dtype=code),
            columns=functools.partial(kernels.dequantize_block_columns, code_dtype=code),
            tiles=functools.partial(kernels.dequantize_block_tiles, code_dtype=code),
        )
