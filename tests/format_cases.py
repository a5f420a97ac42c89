"""Formats, usages and tensors of every kind, with readable names, for tests of several files."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from backstash.formats import (
    FLOAT8_BLOCK,
    FLOAT8_CURRENT,
    FLOAT8_DELAYED,
    FLOAT8_ROWWISE,
    HIGH_PRECISION,
    MXFP8,
    NVFP4,
    Format,
    Hybrid,
    Usage,
)
from backstash.tensors import GroupedTensor, QuantizedTensor

FORMATS = [
    FLOAT8_CURRENT,
    FLOAT8_DELAYED,
    FLOAT8_ROWWISE,
    FLOAT8_BLOCK,
    dataclasses.replace(FLOAT8_BLOCK, two_d=True),
    MXFP8,
    dataclasses.replace(MXFP8, two_d=True),
    NVFP4,
    dataclasses.replace(NVFP4, two_d=True),
    dataclasses.replace(NVFP4, hadamard=True, row_scaled=True),
    Hybrid(rows=FLOAT8_ROWWISE, columns=NVFP4),
    HIGH_PRECISION,
]
USAGES = [Usage.ROWWISE, Usage.COLUMNWISE, Usage.BOTH]


def name_of(format: Format) -> str:
    """The name and the switches that are on."""
    switches = [key for key, value in vars(format).items() if value is True]
    return "-".join([format.name, *switches])


by_format = pytest.mark.parametrize("format", FORMATS, ids=name_of)
by_usage = pytest.mark.parametrize("usage", USAGES, ids=lambda usage: usage.name)
by_grouping = pytest.mark.parametrize("ends", [None, [31, 31, 33]], ids=["one-matrix", "groups"])


def quantized(
    format: Format,
    usage: Usage = Usage.BOTH,
    ends: list[int] | None = None,
    *,
    shape: tuple[int, ...] = (33, 40),
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Random values in a format; a learnt scale is not one, so that losing it shows."""
    x = torch.randn(shape).to(dtype)
    if ends is not None:
        return format.quantize(GroupedTensor(x, ends), usage).data
    scale = torch.tensor([0.7]) if format.stateful else None
    return format.quantize(x, usage, scale=scale)


def valid(format: Format, buffer: str, ends: list[int] | torch.Tensor, rows: int) -> int | None:
    """How many rows of a grouped buffer are real; None: all of them."""
    found = format.valid_rows(buffer, torch.as_tensor(ends, dtype=torch.int32), rows)
    return None if found is None else int(found)


def parts(q: Any) -> dict[str, torch.Tensor]:
    """All that a quantized tensor holds, by name."""
    return q.buffers | ({} if q.ends_G is None else {"ends_G": q.ends_G})


def assert_identical(got: Any, wanted: Any) -> None:
    """The same class, kind and bytes."""
    assert isinstance(got, QuantizedTensor)
    for name in ("format", "usage", "shape", "dtype", "device", "requires_grad"):
        assert getattr(got, name) == getattr(wanted, name), name
    assert parts(got).keys() == parts(wanted).keys()
    for name, buffer in parts(wanted).items():
        torch.testing.assert_close(parts(got)[name], buffer, rtol=0, atol=0)


def pointers(q: Any) -> set[int]:
    """Where the bytes of a quantized tensor lie."""
    return {buffer.data_ptr() for buffer in parts(q).values()}
