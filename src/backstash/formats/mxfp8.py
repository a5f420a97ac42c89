"""MXFP8: blocks of 32 E4M3 codes with a shared power of two (E8M0), as in the OCP
microscaling specification; the exponent is rounded up, so no code saturates.

Scaling by a power of two is exact: the cast is the only rounding.  Rows and columns are
quantized each on its own.  Both keep their codes in the matrix's own order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from backstash import kernels
from backstash.formats.format import BufferSpec, Code, Format, Usage


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8Format(Format):
    """Blocks of 32 along K (rowwise) or along M (columnwise)."""

    name: ClassVar[str] = "mxfp8"
    block: ClassVar[int] = kernels.MX_BLOCK

    @property
    def tolerance(self) -> tuple[float, float]:
        return Code.E4M3.tolerance

    def buffers(
        self, rows: int, columns: int, dtype: torch.dtype, usage: Usage, groups: int | None
    ) -> dict[str, BufferSpec]:
        specs = {}
        if Usage.ROWWISE in usage:
            specs["row_codes"] = BufferSpec((rows, columns), torch.uint8)
            specs["row_scales"] = BufferSpec((rows, -(-columns // self.block)), torch.uint8)
        if Usage.COLUMNWISE in usage:
            # Blocks start anew in every group; the host knows no better bound than this.
            blocks = -(-rows // self.block) + (groups or 0)
            specs["column_codes"] = BufferSpec((rows, columns), torch.uint8)
            specs["column_scales"] = BufferSpec((blocks, columns), torch.uint8)
        return specs

    def encode(
        self, x_MK: Tensor, usage: Usage, ends_G: Tensor | None, scale: Tensor | None
    ) -> dict[str, Tensor]:
        buffers = {}
        if Usage.ROWWISE in usage:
            buffers["row_codes"], buffers["row_scales"] = kernels.quantize_mx_rows(x_MK)
        if Usage.COLUMNWISE in usage:
            codes, scales = kernels.quantize_mx_columns(x_MK, ends_G)
            buffers["column_codes"], buffers["column_scales"] = codes, scales
        return buffers

    def decode(
        self, buffers: Mapping[str, Tensor], dtype: torch.dtype, usage: Usage, ends_G: Tensor | None
    ) -> Tensor:
        if usage is Usage.ROWWISE:
            return kernels.dequantize_mx_rows(buffers["row_codes"], buffers["row_scales"], dtype)
        return kernels.dequantize_mx_columns(
            buffers["column_codes"], buffers["column_scales"], dtype, ends_G
        )

    def valid_rows(self, buffer: str, ends_G: Tensor, rows: int) -> Tensor | None:
        if buffer == "column_scales":
            return kernels.mx_block_ends(ends_G, rows)[-1:]
        return ends_G[-1:].clamp(max=rows)
