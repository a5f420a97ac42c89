"""Float8 with one float32 scale for each row, or for each column of each group.

This is the scaling that a grouped float8 matmul on Hopper takes: what a matmul adds up over
shares a scale.  Rows and columns are quantized each on its own, and both keep their codes in
the matrix's own order.
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
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8Rowwise(Format):
    """A scale for each row (rowwise) or column (columnwise), from its own largest magnitude.

    ``epsilon`` is the least magnitude taken for the largest; ``power_of_two`` makes scaling
    exact at the cost of up to one bit of range.
    """

    code: Code = Code.E4M3
    power_of_two: bool = False
    epsilon: float = 0.0

    name: ClassVar[str] = "float8_rowwise"

    def __post_init__(self) -> None:
        check_code(self.code)
        check_epsilon(self.epsilon)
        check_flags(self, "power_of_two")

    @property
    def tolerance(self) -> tuple[float, float]:
        return self.code.tolerance

    @property
    def has_lone_rows(self) -> bool:
        return True

    def buffers(
        self, rows: int, columns: int, dtype: torch.dtype, usage: Usage, groups: int | None
    ) -> dict[str, BufferSpec]:
        specs = {}
        if usage.has_rows:
            specs["row_codes"] = BufferSpec((rows, columns), torch.uint8)
            specs["row_scale_inv"] = BufferSpec((rows, 1), torch.float32)
        if usage.has_columns:
            specs["column_codes"] = BufferSpec((rows, columns), torch.uint8)
            specs["column_scale_inv"] = BufferSpec((groups or 1, columns), torch.float32)
        return specs

    def encode(
        self,
        x_MK: Tensor,
        usage: Usage,
        ends_G: Tensor | None,
        scale: Tensor | None,
        refill: Refill | None = None,
    ) -> dict[str, Tensor]:
        options = {"epsilon": self.epsilon, "power_of_two": self.power_of_two}
        buffers = {}
        if usage.has_rows:
            buffers["row_codes"], buffers["row_scale_inv"] = kernels.quantize_float8_rows(
                x_MK, self.code.dtype, **options, into=fill(refill, "row_codes", "row_scale_inv")
            )
        if usage.has_columns:
            into = fill(refill, "column_codes", "column_scale_inv")
            buffers["column_codes"], buffers["column_scale_inv"] = kernels.quantize_float8_columns(
                x_MK, self.code.dtype, ends_G, **options, into=into
            )
        return buffers

    def decode(self, buffers: Mapping[str, Tensor], reading: Reading) -> Tensor:
        dtypes = self.code.dtype, reading.dtype
        if reading.usage is Usage.ROWWISE:
            codes, scale_inv = buffers["row_codes"], buffers["row_scale_inv"]
            return kernels.dequantize_float8_rows(codes, scale_inv, *dtypes)
        codes, scale_inv = buffers["column_codes"], buffers["column_scale_inv"]
        return kernels.dequantize_float8_columns(codes, scale_inv, *dtypes, reading.ends_G)

    def valid_rows(self, buffer: str, ends_G: Tensor, rows: int) -> Tensor | None:
        return None if buffer == "column_scale_inv" else ends_G[-1:].clamp(max=rows)

    def part_rows(self, buffer: str, rows: range, of: int) -> slice | None:
        return None if buffer == "column_scale_inv" else slice(rows.start, rows.stop)
