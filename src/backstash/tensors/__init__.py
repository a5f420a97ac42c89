"""Quantized and grouped tensors, and what may be done with them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from backstash.formats import Format, Usage
from backstash.tensors import dispatch as dispatch
from backstash.tensors import optimizer_steps as optimizer_steps
from backstash.tensors.grouped import GroupedTensor, as_ends, counts_to_ends
from backstash.tensors.quantized import QuantizedTensor, equal_groups
from backstash.tensors.storage import from_plain, to_plain


def _wrap(x: Any, *, format: Format, usage: Usage, scale: Tensor | None) -> Any:
    """What ``format.quantize`` does; the formats cannot import this package."""
    if not isinstance(x, GroupedTensor):
        return QuantizedTensor.quantize(x, format=format, usage=usage, ends_G=None, scale=scale)
    data = QuantizedTensor.quantize(
        x.data, format=format, usage=usage, ends_G=x.ends_G, scale=scale
    )
    return GroupedTensor.from_parts(data, x.ends_G, x.overflow)


Format.wrap = staticmethod(_wrap)  # pyright: ignore[reportAttributeAccessIssue]

__all__ = [
    "GroupedTensor",
    "QuantizedTensor",
    "as_ends",
    "counts_to_ends",
    "equal_groups",
    "from_plain",
    "to_plain",
]
