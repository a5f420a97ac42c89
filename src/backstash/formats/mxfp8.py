"""MXFP8: blocks of 32 E4M3 codes with a shared power of two (E8M0), as in the OCP
microscaling specification; the exponent is rounded up, so no code saturates.

Scaling by a power of two is exact: the cast is the only rounding.  Rows and columns are
quantized each on its own; tiles of 32 by 32, meant for weights, serve both directions with
one set of codes.  All keep their codes in the matrix's own order.
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
    check_flags,
    fill,
    whole_blocks,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8Format(Format):
    """Blocks of 32 along K (rowwise) or along M (columnwise), or tiles with ``two_d``."""

    two_d: bool = False

    name: ClassVar[str] = "mxfp8"
    block: ClassVar[int] = kernels.MX_BLOCK

    def __post_init__(self) -> None:
        check_flags(self, "two_d")

    @property
    def tolerance(self) -> tuple[float, float]:
        return Code.E4M3.tolerance

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
        # Blocks start anew in every group; the host knows no better bound than this.
        row_blocks = -(-rows // self.block) + (groups or 0)
        column_blocks = -(-columns // self.block)
        if self.two_d:
            return {"codes": codes, "scales": BufferSpec((row_blocks, column_blocks), torch.uint8)}
        specs = {}
        if usage.has_rows:
            specs["row_codes"] = codes
            specs["row_scales"] = BufferSpec((rows, column_blocks), torch.uint8)
        if usage.has_columns:
            specs["column_codes"] = codes
            specs["column_scales"] = BufferSpec((row_blocks, columns), torch.uint8)
        return specs

    def encode(
        self,
        x_MK: Tensor,
        usage: Usage,
        ends_G: Tensor | None,
        scale: Tensor | None,
        refill: Refill | None = None,
    ) -> dict[str, Tensor]:
        buffers = {}
        if self.two_d:
            into = fill(refill, "codes", "scales")
            buffers["codes"], buffers["scales"] = kernels.quantize_mx_tiles(x_MK, ends_G, into=into)
            return buffers
        rows = columns = None
        names = self.buffers(len(x_MK), x_MK.shape[1], x_MK.dtype, usage, None)
        into = fill(refill, *names)
        if usage is Usage.BOTH:
            rows, columns = kernels.quantize_mx_both(x_MK, ends_G, into=into)
        elif usage is Usage.ROWWISE:
            rows = kernels.quantize_mx_rows(x_MK, into=into)
        else:
            columns = kernels.quantize_mx_columns(x_MK, ends_G, into=into)
        if rows is not None:
            buffers["row_codes"], buffers["row_scales"] = rows
        if columns is not None:
            buffers["column_codes"], buffers["column_scales"] = columns
        return buffers

    def decode(self, buffers: Mapping[str, Tensor], reading: Reading) -> Tensor:
        dtype, ends_G = reading.dtype, reading.ends_G
        if self.two_d:
            return kernels.dequantize_mx_tiles(buffers["codes"], buffers["scales"], dtype, ends_G)
        if reading.usage is Usage.ROWWISE:
            return kernels.dequantize_mx_rows(buffers["row_codes"], buffers["row_scales"], dtype)
        return kernels.dequantize_mx_columns(
            buffers["column_codes"], buffers["column_scales"], dtype, ends_G
        )

    def valid_rows(self, buffer: str, ends_G: Tensor, rows: int) -> Tensor | None:
        if buffer in ("column_scales", "scales"):
            return kernels.block_ends(ends_G, rows, self.block)[-1:]
        return ends_G[-1:].clamp(max=rows)

    def part_rows(self, buffer: str, rows: range, of: int) -> slice | None:
        if buffer in ("column_scales", "scales"):
            return whole_blocks(self.name, self.block, rows, of)
        return slice(rows.start, rows.stop)
