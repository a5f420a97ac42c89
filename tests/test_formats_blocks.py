"""A format of blocks is its kernels and its sizes; where blocks lie follows from those."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from backstash.errors import LayoutError, RecipeError
from backstash.formats import FLOAT8_BLOCK, MXFP8, BufferSpec, Reading, Usage
from backstash.formats.blocks import BlockFormat, Dequantizers, Quantizers

M, K, B = 7, 5, 4


def _said(kernel: str) -> Any:
    """A kernel that gives its name and what it was given, instead of tensors."""
    return lambda *args, **options: (kernel, (len(args), *sorted(options)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Named(BlockFormat):
    """Its buffers are the names of the kernels that were to make them."""

    name: ClassVar[str] = "named"
    block: ClassVar[int] = B
    scales: ClassVar[str] = "factors"
    scale_dtype: ClassVar[torch.dtype] = torch.int16

    @property
    def tolerance(self) -> tuple[float, float]:
        return (0.0, 0.0)

    def quantizers(self) -> Quantizers:
        def both(*args: Any, **options: Any) -> tuple[Any, Any]:
            return _said("both")(*args, **options), _said("both")(*args, **options)

        return Quantizers(_said("rows"), _said("columns"), both, _said("tiles"))

    def dequantizers(self) -> Dequantizers:
        return Dequantizers(_said("rows"), _said("columns"), _said("tiles"))


def encoded(usage: Usage, *, two_d: bool = False) -> Any:
    return Named(two_d=two_d).encode(torch.zeros(M, K), usage, None, None)


def test_each_usage_is_encoded_by_its_own_kernel() -> None:
    rows, columns = ("row_codes", "row_factors"), ("column_codes", "column_factors")
    assert encoded(Usage.ROWWISE) == dict(zip(rows, ("rows", (1, "into")), strict=True))
    assert encoded(Usage.COLUMNWISE)["column_codes"] == "columns"
    assert tuple(encoded(Usage.BOTH)) == rows + columns
    assert {encoded(Usage.BOTH)[name] for name in ("row_codes", "column_codes")} == {"both"}


@pytest.mark.parametrize("usage", [Usage.ROWWISE, Usage.COLUMNWISE, Usage.BOTH])
def test_tiles_are_one_set_of_codes_for_every_usage(usage: Usage) -> None:
    assert tuple(encoded(usage, two_d=True)) == ("codes", "factors")
    assert encoded(usage, two_d=True)["codes"] == "tiles"
    assert Named(two_d=True).serves_both
    assert not Named(two_d=True).has_lone_rows


@pytest.mark.parametrize(
    ("format", "usage", "kernel"),
    [
        (Named(), Usage.ROWWISE, "rows"),
        (Named(), Usage.COLUMNWISE, "columns"),
        (Named(two_d=True), Usage.COLUMNWISE, "tiles"),
    ],
    ids=["rows", "columns", "tiles"],
)
def test_values_are_decoded_along_the_direction_that_is_read(
    format: Named, usage: Usage, kernel: str
) -> None:
    names = format.buffers(M, K, torch.float32, Usage.BOTH, None)
    buffers = {name: torch.zeros(0) for name in names}
    came: Any = format.decode(buffers, Reading(M, K, torch.float32, usage))
    assert came[0] == kernel


def test_scales_are_counted_in_blocks_and_begin_anew_in_each_group() -> None:
    def scales(format: Named, groups: int | None) -> dict[str, BufferSpec]:
        specs = format.buffers(M, K, torch.float32, Usage.BOTH, groups)
        return {name: spec for name, spec in specs.items() if name.endswith("factors")}

    lines = BufferSpec((M, 2), torch.int16)
    assert scales(Named(), None) == {
        "row_factors": lines,
        "column_factors": BufferSpec((2, K), torch.int16),
    }
    assert scales(Named(), 3) == {
        "row_factors": lines,
        "column_factors": BufferSpec((2 + 3, K), torch.int16),
    }
    assert scales(Named(two_d=True), 3) == {"factors": BufferSpec((2 + 3, 2), torch.int16)}


@pytest.mark.parametrize(("buffer", "used"), [("column_factors", 1 + 0 + 2), ("row_factors", 6)])
def test_valid_rows_of_scales_down_columns_are_blocks(buffer: str, used: int) -> None:
    ends_G = torch.tensor([1, 1, 6])  # groups of one, none and five rows
    rows = Named().valid_rows(buffer, ends_G, M)
    assert isinstance(rows, Tensor)
    assert rows.tolist() == [used]


def test_rows_are_cut_between_blocks_only_where_blocks_run_down_the_rows() -> None:
    assert Named().part_rows("row_factors", range(1, 3), M) == slice(1, 3)
    assert Named().part_rows("column_factors", range(4, 7), M) == slice(1, 2)
    with pytest.raises(LayoutError, match="cut its blocks of 4 rows"):
        Named().part_rows("column_factors", range(1, 3), M)


@pytest.mark.parametrize("format", [MXFP8, FLOAT8_BLOCK], ids=lambda format: format.name)
def test_tiles_are_a_switch(format: BlockFormat) -> None:
    wrong: Any = "yes"
    with pytest.raises(RecipeError, match="two_d must be True or False, got 'yes'"):
        dataclasses.replace(format, two_d=wrong)
