"""What formats have in common that give each block of values a scale of its own.

A block is a *line* of ``block`` values, along K for the rowwise usage and down the rows for the
columnwise one, or, with ``two_d``, a *tile* of ``block`` by ``block``.  Lines are quantized for
each direction on its own.  The transpose of a matrix has the same tiles, so one set of codes
serves both.  Codes keep the matrix's own order, and blocks of rows start anew in each group.

Letters: M rows, K columns.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from backstash import kernels
from backstash.formats.format import (
    BufferSpec,
    Format,
    Reading,
    Refill,
    Usage,
    check_flags,
    fill,
    whole_blocks,
)


class Quantizers(NamedTuple):
    """Kernels of ``(x, ends_G=, into=)`` that give codes and scales; ``rows`` has no groups."""

    rows: Callable[..., Any]
    columns: Callable[..., Any]
    #: The pairs of both directions, in one pass over the values.
    both: Callable[..., Any]
    tiles: Callable[..., Any]


class Dequantizers(NamedTuple):
    """Kernels of ``(codes, scales, dtype=, ends_G=)`` that give values; ``rows`` has no groups."""

    rows: Callable[..., Tensor]
    columns: Callable[..., Tensor]
    tiles: Callable[..., Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockFormat(Format):
    """Codes of one byte, with a scale for each line of ``block`` values, or for each tile."""

    two_d: bool = False

    #: Values of a line, rows and columns of a tile.
    block: ClassVar[int]
    #: The name and the dtype of the buffer of scales.
    scales: ClassVar[str]
    scale_dtype: ClassVar[torch.dtype]

    def __post_init__(self) -> None:
        check_flags(self, "two_d")

    @abc.abstractmethod
    def quantizers(self) -> Quantizers:
        """What encodes, with the options of this format."""

    @abc.abstractmethod
    def dequantizers(self) -> Dequantizers:
        """What decodes."""

    @property
    def serves_both(self) -> bool:
        return self.two_d

    @property
    def has_lone_rows(self) -> bool:
        return not self.two_d

    def _names(self, prefix: str) -> tuple[str, str]:
        return prefix + "codes", prefix + self.scales

    def buffers(
        self, rows: int, columns: int, dtype: torch.dtype, usage: Usage, groups: int | None
    ) -> dict[str, BufferSpec]:
        codes = BufferSpec((rows, columns), torch.uint8)
        # Blocks start anew in every group; the host knows no better bound than this.
        row_blocks = -(-rows // self.block) + (groups or 0)
        column_blocks = -(-columns // self.block)

        def spec(*shape: int) -> tuple[BufferSpec, BufferSpec]:
            return codes, BufferSpec(shape, self.scale_dtype)

        if self.two_d:
            return dict(zip(self._names(""), spec(row_blocks, column_blocks), strict=True))
        specs: dict[str, BufferSpec] = {}
        if usage.has_rows:
            specs |= zip(self._names("row_"), spec(rows, column_blocks), strict=True)
        if usage.has_columns:
            specs |= zip(self._names("column_"), spec(row_blocks, columns), strict=True)
        return specs

    def encode(
        self,
        x_MK: Tensor,
        usage: Usage,
        ends_G: Tensor | None,
        scale: Tensor | None,
        refill: Refill | None = None,
    ) -> dict[str, Tensor]:
        casts, rows, columns = self.quantizers(), self._names("row_"), self._names("column_")
        if self.two_d:
            names = self._names("")
            made = casts.tiles(x_MK, ends_G=ends_G, into=fill(refill, *names))
        elif usage is Usage.BOTH:
            names = rows + columns
            pairs = casts.both(x_MK, ends_G=ends_G, into=fill(refill, *names))
            made = pairs[0] + pairs[1]
        elif usage is Usage.ROWWISE:
            names = rows
            made = casts.rows(x_MK, into=fill(refill, *names))
        else:
            names = columns
            made = casts.columns(x_MK, ends_G=ends_G, into=fill(refill, *names))
        return dict(zip(names, made, strict=True))

    def decode(self, buffers: Mapping[str, Tensor], reading: Reading) -> Tensor:
        casts, dtype, ends_G = self.dequantizers(), reading.dtype, reading.ends_G
        if self.two_d:
            codes, scales = (buffers[name] for name in self._names(""))
            return casts.tiles(codes, scales, dtype=dtype, ends_G=ends_G)
        if reading.usage is Usage.ROWWISE:
            codes, scales = (buffers[name] for name in self._names("row_"))
            return casts.rows(codes, scales, dtype=dtype)
        codes, scales = (buffers[name] for name in self._names("column_"))
        return casts.columns(codes, scales, dtype=dtype, ends_G=ends_G)

    def valid_rows(self, buffer: str, ends_G: Tensor, rows: int) -> Tensor | None:
        if self._has_row_blocks(buffer):
            return kernels.block_ends(ends_G, rows, self.block)[-1:]
        return ends_G[-1:].clamp(max=rows)

    def part_rows(self, buffer: str, rows: range, of: int) -> slice | None:
        if self._has_row_blocks(buffer):
            return whole_blocks(self.name, self.block, rows, of)
        return slice(rows.start, rows.stop)

    def _has_row_blocks(self, buffer: str) -> bool:
        """Whether a row of this buffer is the scales of a block of rows."""
        return buffer in (self.scales, f"column_{self.scales}")
