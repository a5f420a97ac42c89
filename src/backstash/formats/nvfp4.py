"""NVFP4: four-bit E2M1 codes, an E4M3 scale for each block of 16, a float32 scale over all.

Rows keep the order of the matrix, two neighbours a byte.  Columns are transposed, group by
group, so a range of rows is no range of their bytes; what all groups have is a prefix all
the same, which is why their buffer is counted in rows of K bytes.  An odd K, or a group that
is no multiple of a block, is padded inside.  Weights may have tiles of 16 by 16, with one set
of codes for both directions.

The Hadamard transform mixes sixteen rows of a column so that one large value spoils no block.
It is undone when values are read, in float32, and so the values are those of the matrix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from backstash import kernels
from backstash.errors import LayoutError, RecipeError
from backstash.formats.format import (
    BufferSpec,
    Format,
    Reading,
    Refill,
    Usage,
    amax_of,
    check_flags,
    whole_blocks,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NVFP4Format(Format):
    """Blocks of 16 along K (rowwise) or along M (columnwise), or tiles with ``two_d``.

    Attributes:
        two_d: Tiles of 16 by 16 for weights.
        row_scaled: The float32 scale is that of a row (of a group's column), not of a tensor.
        hadamard: Transform what is quantized along columns; both operands of a weight
            gradient should be.
        stochastic_rounding: Round to one of the two neighbours at random, so that the mean
            of many roundings is the value; seeds are drawn from torch's generator.
        four_over_six: Bring a block's largest magnitude to 4 or to 6, whichever errs less.
    """

    two_d: bool = False
    row_scaled: bool = False
    hadamard: bool = False
    stochastic_rounding: bool = False
    four_over_six: bool = False

    name: ClassVar[str] = "nvfp4"
    block: ClassVar[int] = kernels.NVFP4_BLOCK

    def __post_init__(self) -> None:
        check_flags(self, *(field.name for field in dataclasses.fields(self)))
        for other in ("row_scaled", "hadamard"):
            if self.two_d and getattr(self, other):
                raise RecipeError(
                    f"two_d gives both directions one set of codes, and {other} makes them "
                    f"differ; leave one of the two out"
                )

    @property
    def tolerance(self) -> tuple[float, float]:
        # A draw is one of the two neighbours, so it is off by a step where the nearest is by half.
        return (0.5, 0.25) if self.stochastic_rounding else (0.25, 0.125)

    @property
    def row_multiple(self) -> int:
        """To how many rows the columns of a group are padded: whole bytes, or whole blocks."""
        return self.block if self.hadamard else 2

    @property
    def serves_both(self) -> bool:
        return self.two_d

    @property
    def has_lone_rows(self) -> bool:
        # Copies of a row are to be rounded at random each on its own.
        return self.row_scaled and not self.stochastic_rounding

    def buffers(
        self, rows: int, columns: int, dtype: torch.dtype, usage: Usage, groups: int | None
    ) -> dict[str, BufferSpec]:
        row_blocks = -(-rows // self.block) + (groups or 0)
        column_blocks = -(-columns // self.block)
        row_codes = BufferSpec((rows, -(-columns // 2)), torch.uint8)
        amax = BufferSpec((groups or 1,), torch.float32)
        if self.two_d:
            scales = BufferSpec((row_blocks, column_blocks), torch.uint8)
            return {"codes": row_codes, "scales": scales, "amax": amax}
        specs = {}
        if usage.has_rows:
            of_rows = BufferSpec((rows, 1), torch.float32)
            specs["row_codes"] = row_codes
            specs["row_scales"] = BufferSpec((rows, column_blocks), torch.uint8)
            specs["row_amax"] = of_rows if self.row_scaled else amax
        if usage.has_columns:
            width = kernels.nvfp4_column_bytes(rows, 1, groups, self.row_multiple)
            of_columns = BufferSpec((groups or 1, columns), torch.float32)
            specs["column_codes"] = BufferSpec((width, columns), torch.uint8)
            specs["column_scales"] = BufferSpec((row_blocks, columns), torch.uint8)
            specs["column_amax"] = of_columns if self.row_scaled else amax
        return specs

    def encode(
        self,
        x_MK: Tensor,
        usage: Usage,
        ends_G: Tensor | None,
        scale: Tensor | None,
        refill: Refill | None = None,
    ) -> dict[str, Tensor]:
        seed, noop = self._seed(x_MK), None if refill is None else refill.noop
        options: dict[str, Any] = {"four_over_six": self.four_over_six}
        options["into"] = _into(refill, usage, two_d=self.two_d)
        if self.two_d:
            amax = amax_of(x_MK, ends_G, noop)
            codes, scales = kernels.quantize_nvfp4_tiles(x_MK, amax, ends_G, seed, **options)
            return {"codes": codes, "scales": scales, "amax": amax}
        rotation = self._rotation(x_MK.device)
        if usage is Usage.ROWWISE:
            amax = self._row_amax(x_MK, ends_G, noop)
            rows = kernels.quantize_nvfp4_rows(x_MK, amax, ends_G, seed, **options)
            return self._row_parts(rows, amax)
        if usage is Usage.COLUMNWISE:
            amax = self._column_amax(x_MK, ends_G, rotation, noop)
            columns = kernels.quantize_nvfp4_columns(x_MK, amax, ends_G, rotation, seed, **options)
            return self._column_parts(columns, amax, len(x_MK))
        row_amax = column_amax = self._row_amax(x_MK, ends_G, noop)
        if self.row_scaled or self.hadamard:
            column_amax = self._column_amax(x_MK, ends_G, rotation, noop)
        both = (row_amax, column_amax)
        rows, columns = kernels.quantize_nvfp4_both(x_MK, both, ends_G, rotation, seed, **options)
        if column_amax is row_amax:
            # Either direction can be kept and written alone: they must not share memory.
            column_amax = row_amax.clone()
        row_parts = self._row_parts(rows, row_amax)
        return row_parts | self._column_parts(columns, column_amax, len(x_MK))

    def _row_amax(self, x_MK: Tensor, ends_G: Tensor | None, noop: Tensor | None) -> Tensor:
        return kernels.row_amax(x_MK) if self.row_scaled else amax_of(x_MK, ends_G, noop)

    def _column_amax(
        self, x_MK: Tensor, ends_G: Tensor | None, rotation: Tensor | None, noop: Tensor | None
    ) -> Tensor:
        if rotation is not None:
            amax_GK = kernels.rotated_column_amax(x_MK, rotation, ends_G, noop=noop)
            return amax_GK if self.row_scaled else _largest(amax_GK)
        if self.row_scaled:
            return kernels.column_amax(x_MK, ends_G)
        return amax_of(x_MK, ends_G, noop)

    def _row_parts(self, pair: tuple[Tensor, Tensor], amax: Tensor) -> dict[str, Tensor]:
        return {"row_codes": pair[0], "row_scales": pair[1], "row_amax": amax}

    def _column_parts(
        self, pair: tuple[Tensor, Tensor], amax: Tensor, rows: int
    ) -> dict[str, Tensor]:
        """The transposed codes are counted in rows of K bytes."""
        codes, scales = pair
        groups = len(scales) - -(-rows // self.block)
        width = kernels.nvfp4_column_bytes(rows, 1, groups or None, self.row_multiple)
        codes = codes.view(width, scales.shape[1])
        return {"column_codes": codes, "column_scales": scales, "column_amax": amax}

    def decode(self, buffers: Mapping[str, Tensor], reading: Reading) -> Tensor:
        dtype, ends_G = reading.dtype, reading.ends_G

        def parts(prefix: str) -> tuple[Tensor, Tensor, Tensor]:
            return buffers[prefix + "codes"], buffers[prefix + "scales"], buffers[prefix + "amax"]

        if self.two_d:
            return kernels.dequantize_nvfp4_tiles(*parts(""), reading.columns, dtype, ends_G)
        if reading.usage is Usage.ROWWISE:
            return kernels.dequantize_nvfp4_rows(*parts("row_"), reading.columns, dtype, ends_G)
        codes, scales, amax = parts("column_")
        rotation = self._rotation(codes.device)
        return kernels.dequantize_nvfp4_columns(
            codes.flatten(), scales, amax, reading.rows, dtype, ends_G, rotation
        )

    def valid_rows(self, buffer: str, ends_G: Tensor, rows: int) -> Tensor | None:
        """As in the base; the transposed codes are counted in rows of K bytes."""
        if buffer == "column_codes":
            return kernels.nvfp4_column_ends(ends_G, rows, 1, self.row_multiple)[-1:]
        if buffer in ("column_scales", "scales"):
            return kernels.block_ends(ends_G, rows, self.block)[-1:]
        if buffer in ("amax", "column_amax") or (buffer == "row_amax" and not self.row_scaled):
            return None
        return ends_G[-1:].clamp(max=rows)

    def part_rows(self, buffer: str, rows: range, of: int) -> slice | None:
        """As in the base; no rows are by themselves in the transposed codes."""
        if buffer.startswith("column"):
            raise LayoutError(
                f"{self.name} keeps columns transposed, so no range of its bytes is rows "
                f"{rows.start} to {rows.stop}; keep the rowwise usage only(), or dequantize() first"
            )
        if buffer == "scales":
            return whole_blocks(self.name, self.block, rows, of)
        if buffer == "amax" or (buffer == "row_amax" and not self.row_scaled):
            return None
        return slice(rows.start, rows.stop)

    def _rotation(self, device: torch.device) -> Tensor | None:
        return kernels.hadamard_matrix(device) if self.hadamard else None

    def _seed(self, x_MK: Tensor) -> Tensor | None:
        return kernels.draw_seed(x_MK.device) if self.stochastic_rounding else None


def _into(refill: Refill | None, usage: Usage, *, two_d: bool) -> kernels.Into | None:
    """Where codes and scales go; the largest magnitudes are few, and are copied."""
    if refill is None:
        return None
    names = ["codes", "scales"] if two_d else []
    if usage.has_rows and not two_d:
        names += ["row_codes", "row_scales"]
    if usage.has_columns and not two_d:
        names += ["column_codes", "column_scales"]
    buffers = (refill.buffers[name] for name in names)
    # A kernel knows the transposed codes as one line of bytes.
    flat = (
        b.flatten() if name == "column_codes" else b for name, b in zip(names, buffers, strict=True)
    )
    return kernels.Into(tuple(flat), refill.noop)


def _largest(amax_GK: Tensor) -> Tensor:
    """The largest of each group's columns; zero where there are none."""
    return kernels.row_amax(amax_GK).flatten()
