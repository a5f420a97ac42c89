"""One format for what is read along rows and another for what is read down columns.

Forward can then run in a coarser format than the weight gradient, or the other way round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from backstash.errors import RecipeError
from backstash.formats.format import (
    BufferSpec,
    Format,
    Reading,
    Refill,
    Usage,
)

_PREFIX = {Usage.ROWWISE: "rows_", Usage.COLUMNWISE: "columns_"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hybrid(Format):
    """``rows`` for the rowwise usage, ``columns`` for the columnwise one.

    Raises:
        RecipeError: One of them is no format, is itself a hybrid, or learns its scale.
    """

    rows: Format
    columns: Format

    name: ClassVar[str] = "hybrid"

    def __post_init__(self) -> None:
        for side in ("rows", "columns"):
            format = getattr(self, side)
            if not isinstance(format, Format) or isinstance(format, Hybrid) or format.stateful:
                raise RecipeError(
                    f"the {side} of a hybrid must be a format that is no hybrid and computes its "
                    f"own scales, got {format!r}; use FLOAT8_CURRENT for FLOAT8_DELAYED"
                )

    @property
    def tolerance(self) -> tuple[float, float]:
        rows, columns = self.rows.tolerance, self.columns.tolerance
        return max(rows[0], columns[0]), max(rows[1], columns[1])

    def buffers(
        self, rows: int, columns: int, dtype: torch.dtype, usage: Usage, groups: int | None
    ) -> dict[str, BufferSpec]:
        return {
            _PREFIX[side] + name: spec
            for side in usage.sides
            for name, spec in self.along(side).buffers(rows, columns, dtype, side, groups).items()
        }

    def encode(
        self,
        x_MK: Tensor,
        usage: Usage,
        ends_G: Tensor | None,
        scale: Tensor | None,
        refill: Refill | None = None,
    ) -> dict[str, Tensor]:
        buffers = {}
        for side in usage.sides:
            own = refill and Refill(self.buffers_along(refill.buffers, side), refill.noop)
            encoded = self.along(side).encode(x_MK, side, ends_G, None, own)
            buffers |= {_PREFIX[side] + name: buffer for name, buffer in encoded.items()}
        return buffers

    def decode(self, buffers: Mapping[str, Tensor], reading: Reading) -> Tensor:
        own = self.buffers_along(buffers, reading.usage)
        return self.along(reading.usage).decode(own, reading)

    def valid_rows(self, buffer: str, ends_G: Tensor, rows: int) -> Tensor | None:
        format, name = self._owner(buffer)
        return format.valid_rows(name, ends_G, rows)

    def part_rows(self, buffer: str, rows: range, of: int) -> slice | None:
        format, name = self._owner(buffer)
        return format.part_rows(name, rows, of)

    def _owner(self, buffer: str) -> tuple[Format, str]:
        """The format of one of the buffers, and what that format calls it."""
        side = next(side for side, prefix in _PREFIX.items() if buffer.startswith(prefix))
        return self.along(side), buffer.removeprefix(_PREFIX[side])

    def along(self, usage: Usage) -> Format:
        """The format of one direction."""
        return self.rows if usage is Usage.ROWWISE else self.columns

    def buffers_along(self, buffers: Mapping[str, Tensor], usage: Usage) -> Mapping[str, Tensor]:
        """Those of one direction's format, without the prefix that tells them apart here."""
        prefix = _PREFIX[usage]
        return {
            name.removeprefix(prefix): buffer
            for name, buffer in buffers.items()
            if name.startswith(prefix)
        }
