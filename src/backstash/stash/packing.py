"""How values lie in pages: as the bytes that they are, or quantized on their way in.

A page kernel tells by its operand's dtype: ``uint8`` is copied, floating-point values become
codes and an exponent for each 32 of them.  So a buffer is packed as it is handed over, each by
itself, whatever else the same node saves.
"""

from __future__ import annotations

import functools

import torch

from backstash import kernels
from backstash.errors import ConfigError, DeviceError
from backstash.formats import MXFP8, Format

_COMPRESSIBLE = (torch.bfloat16, torch.float16, torch.float32)
_FLOAT8_CAPABILITY = (8, 9)


def packed_as(dtype: torch.dtype, compress: Format | None) -> torch.dtype:
    """The dtype that values of ``dtype`` are handed over in: codes and whole numbers as bytes."""
    return torch.uint8 if compress is None or dtype not in _COMPRESSIBLE else dtype


@functools.cache
def payload_bytes(packed: torch.dtype, page_bytes: int) -> int:
    """Bytes of a buffer that one page holds."""
    return kernels.page_payload(packed, page_bytes) * packed.itemsize


def check_compression(compress: Format | None, page_bytes: int, device: torch.device) -> None:
    """Refuse a format that pages cannot be packed in.

    Raises:
        ConfigError: It is none of those, or a page is too small for one block.
        DeviceError: The GPU has no float8.
    """
    if compress is None:
        return
    if compress != MXFP8:
        came = compress.name if isinstance(compress, Format) else repr(compress)
        raise ConfigError(
            f"values are compressed to MXFP8 or not at all, got {came}; pass compress=MXFP8, or "
            "leave compress out"
        )
    if not payload_bytes(torch.bfloat16, page_bytes):
        raise ConfigError(
            f"compression needs pages of 64 bytes or more, got {page_bytes}; make the pool with a "
            "larger page_bytes, or leave compress out"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FLOAT8_CAPABILITY:
        raise DeviceError(
            f"compression needs a GPU with float8, of capability 8.9 or more, got "
            f"{torch.cuda.get_device_capability(device)}; leave compress out"
        )
