"""The number formats as values, one file for each family."""

from __future__ import annotations

from typing import Any

from backstash.errors import CheckpointError
from backstash.formats.float8 import Float8Current, Float8Delayed
from backstash.formats.format import BufferSpec, Code, Format, Usage, check_floating
from backstash.formats.high_precision import HighPrecisionFormat
from backstash.formats.mxfp8 import MXFP8Format

FLOAT8_CURRENT = Float8Current()
FLOAT8_DELAYED = Float8Delayed()
MXFP8 = MXFP8Format()
HIGH_PRECISION = HighPrecisionFormat()

_FAMILIES: dict[str, type[Format]] = {
    family.name: family
    for family in (Float8Current, Float8Delayed, MXFP8Format, HighPrecisionFormat)
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
        return family(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"a stored number format must be one of {sorted(_FAMILIES)} with its own fields, "
            f"got {spec}; the file is damaged or was written by a newer version"
        ) from error


__all__ = [
    "FLOAT8_CURRENT",
    "FLOAT8_DELAYED",
    "HIGH_PRECISION",
    "MXFP8",
    "BufferSpec",
    "Code",
    "Float8Current",
    "Float8Delayed",
    "Format",
    "HighPrecisionFormat",
    "MXFP8Format",
    "Usage",
    "check_floating",
    "from_spec",
]
