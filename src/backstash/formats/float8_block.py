"""Float8 in blocks of 128, each with a float32 scale.

Inputs and gradients have blocks of 1 by 128 along what a matmul adds up over, so rows and
columns are quantized each on its own.  Weights have tiles of 128 by 128: one set of codes
serves both directions, since the transpose has the same tiles.  A matmul wants lines on one
side at least; tiles on both are refused by recipes.  All keep the matrix's own order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from backstash import kernels
from backstash.formats.format import (
    BufferSpec,
    Code,
    Format,
    Reading,
    Refill,
    Usage,
    check_code,
    check_epsilon,
    check_flags,
    fill,
    whole_blocks,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8Block(Format):
    """Blocks of 128 along K (rowwise) or along M (columnwise), or tiles with ``two_d``.

    ``power_of_two`` scales make scaling exact; ``epsilon`` is the least magnitude taken for
    the largest of a block.
    """

    code: Code = Code.E4M3
    two_d: bool = False
    power_of_two: bool = True
    epsilon: float = 0.0

    name: ClassVar[str] = "float8_block"
    block: ClassVar[int] = kernels.FLOAT8_BLOCK

    def __post_init__(self) -> None:
        check_code(self.code)
        check_epsilon(self.epsilon)
        check_flags(self, "two_d", "power_of_two")

    @property
    def tolerance(self) -> tuple[float, float]:
        return self.code.tolerance

    @property
    def serves_both(self) -> bool:
        return self.two_d

    @property
    def has_lone_rows(self) -> bool:
        return not self.two_d

    def buffers(
        self, rows: int, columns: int, dtype: torch.dtype, usage: Usage, groups: int | None
    ) -> dict[str, BufferSpec]:
        codes = BufferSpec((rows, columns), torch.uint8)
        row_blocks = -(-rows // self.block) + (groups or 0)
        column_blocks = -(-columns // self.block)
        if self.two_d:
            scales = BufferSpec((row_blocks, column_blocks), torch.float32)
            return {"codes": codes, "scale_inv": scales}
        specs = {}
        if usage.has_rows:
            specs["row_codes"] = codes
            specs["row_scale_inv"] = BufferSpec((rows, column_blocks), torch.float32)
        if usage.has_columns:
            specs["column_codes"] = codes
            specs["column_scale_inv"] = BufferSpec((row_blocks, columns), torch.float32)
        return specs

    def encode(
        self,
        x_MK: Tensor,
        usage: Usage,
        ends_G: Tensor | None,
        scale: Tensor | None,
        refill: Refill | None = None,
    ) -> dict[str, Tensor]:
        code = self.code.dtype
        options = {"epsilon": self.epsilon, "power_of_two": self.power_of_two}
        if self.two_d:
            into = fill(refill, "codes", "scale_inv")
            codes, scale_inv = kernels.quantize_block_tiles(
                x_MK, code, ends_G, **options, into=into
            )
            return {"codes": codes, "scale_inv": scale_inv}
        rows, columns = ("row_codes", "row_scale_inv"), ("column_codes", "column_scale_inv")
        if usage is Usage.BOTH:
            into = fill(refill, *rows, *columns)
            pairs = kernels.quantize_block_both(x_MK, code, ends_G, **options, into=into)
            return dict(zip(rows + columns, pairs[0] + pairs[1], strict=True))
        if usage is Usage.ROWWISE:
            pair = kernels.quantize_block_rows(x_MK, code, **options, into=fill(refill, *rows))
            return dict(zip(rows, pair, strict=True))
        into = fill(refill, *columns)
        pair = kernels.quantize_block_columns(x_MK, code, ends_G, **options, into=into)
        return dict(zip(columns, pair, strict=True))

    def decode(self, buffers: Mapping[str, Tensor], reading: Reading) -> Tensor:
        dtypes = self.code.dtype, reading.dtype
        if self.two_d:
            codes, scale_inv = buffers["codes"], buffers["scale_inv"]
            return kernels.dequantize_block_tiles(codes, scale_inv, *dtypes, reading.ends_G)
        if reading.usage is Usage.ROWWISE:
            codes, scale_inv = buffers["row_codes"], buffers["row_scale_inv"]
            return kernels.dequantize_block_rows(codes, scale_inv, *dtypes)
        codes, scale_inv = buffers["column_codes"], buffers["column_scale_inv"]
        return kernels.dequantize_block_columns(codes, scale_inv, *dtypes, reading.ends_G)

    def valid_rows(self, buffer: str, ends_G: Tensor, rows: int) -> Tensor | None:
        if buffer in ("column_scale_inv", "scale_inv"):
            return kernels.block_ends(ends_G, rows, self.block)[-1:]
        return ends_G[-1:].clamp(max=rows)

    def part_rows(self, buffer: str, rows: range, of: int) -> slice | None:
        if buffer in ("column_scale_inv", "scale_inv"):
            return whole_blocks(self.name, self.block, rows, of)
        return slice(rows.start, rows.stop)
