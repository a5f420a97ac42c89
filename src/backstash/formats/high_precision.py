"""The format that changes nothing: values as they are, one buffer for both directions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from backstash.formats.format import (
    BufferSpec,
    Format,
    Reading,
    Refill,
    Usage,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HighPrecisionFormat(Format):
    """Values in their own dtype; a round trip is exact."""

    name: ClassVar[str] = "high_precision"
    any_view: ClassVar[bool] = True

    @property
    def tolerance(self) -> tuple[float, float]:
        return (0.0, 0.0)

    def buffers(
        self, rows: int, columns: int, dtype: torch.dtype, usage: Usage, groups: int | None
    ) -> dict[str, BufferSpec]:
        return {"values": BufferSpec((rows, columns), dtype)}

    def encode(
        self,
        x_MK: Tensor,
        usage: Usage,
        ends_G: Tensor | None,
        scale: Tensor | None,
        refill: Refill | None = None,
    ) -> dict[str, Tensor]:
        return {"values": x_MK.clone(memory_format=torch.contiguous_format)}

    def decode(self, buffers: Mapping[str, Tensor], reading: Reading) -> Tensor:
        return buffers["values"].to(reading.dtype, copy=True)

    def valid_rows(self, buffer: str, ends_G: Tensor, rows: int) -> Tensor | None:
        return ends_G[-1:].clamp(max=rows)

    def part_rows(self, buffer: str, rows: range, of: int) -> slice | None:
        return slice(rows.start, rows.stop)
