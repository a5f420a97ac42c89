"""The number formats as values, one file for each family."""

from __future__ import annotations

from typing import Any

from backstash.errors import CheckpointError
from backstash.formats.float8 import Float8Current, Float8Delayed
from backstash.formats.float8_block import Float8Block
from backstash.formats.float8_rowwise import Float8Rowwise
from backstash.formats.format import BufferSpec, Code, Format, Reading, Usage, check_floating
from backstash.formats.high_precision import HighPrecisionFormat
from backstash.formats.hybrid import Hybrid
from backstash.formats.mxfp8 import MXFP8Format
from backstash.formats.nvfp4 import NVFP4Format

FLOAT8_CURRENT = Float8Current()
FLOAT8_DELAYED = Float8Delayed()
FLOAT8_ROWWISE = Float8Rowwise()
FLOAT8_BLOCK = Float8Block()
MXFP8 = MXFP8Format()
NVFP4 = NVFP4Format()
HIGH_PRECISION = HighPrecisionFormat()

_FAMILIES: dict[str, type[Format]] = {
    family.name: family
    for family in (
        Float8Current,
        Float8Delayed,
        Float8Rowwise,
        Float8Block,
        MXFP8Format,
        NVFP4Format,
        HighPrecisionFormat,
        Hybrid,
    )
}


def from_spec(spec: dict[str, Any]) -> Format:
    """The format that :meth:`Format.spec` described.

    Raises:
        CheckpointError: No format has this name or these fields.
    """
    try:
        fields = dict(spec)
        family = _FAMILIES[fields.pop("name")]
        if "code" in fields:
            fields["code"] = Code(fields["code"])
        for side in {"rows", "columns"} & fields.keys():
            fields[side] = from_spec(fields[side])
        return family(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"a stored number format must be one of {sorted(_FAMILIES)} with its own fields, "
            f"got {spec}; the file is damaged or was written by a newer version"
        ) from error


__all__ = [
    "FLOAT8_BLOCK",
    "FLOAT8_CURRENT",
    "FLOAT8_DELAYED",
    "FLOAT8_ROWWISE",
    "HIGH_PRECISION",
    "MXFP8",
    "NVFP4",
    "BufferSpec",
    "Code",
    "Float8Block",
    "Float8Current",
    "Float8Delayed",
    "Float8Rowwise",
    "Format",
    "HighPrecisionFormat",
    "Hybrid",
    "MXFP8Format",
    "NVFP4Format",
    "Reading",
    "Usage",
    "check_floating",
    "from_spec",
]
