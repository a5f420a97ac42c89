"""How values lie in pages: as the bytes that they are, or quantized on their way in."""

from __future__ import annotations

import enum
from collections.abc import Callable

import torch
from torch import Tensor

from backstash import kernels
from backstash.errors import ConfigError
from backstash.formats import MXFP8, Format

_COMPRESSIBLE = (torch.bfloat16, torch.float16, torch.float32)


class Packing(enum.Enum):
    """What a page holds of a buffer."""

    #: The buffer's own bytes: exact.
    BYTES = "bytes"
    #: Codes of the buffer's values and an exponent for each 32 of them: lossy.
    MXFP8 = "mxfp8"

    @classmethod
    def of(cls, dtype: torch.dtype, compress: Format | None) -> Packing:
        """How values of ``dtype`` are packed; codes and whole numbers are never compressed."""
        return cls.BYTES if compress is None or dtype not in _COMPRESSIBLE else cls.MXFP8

    def payload(self, dtype: torch.dtype, page_bytes: int) -> int:
        """Bytes of a buffer of ``dtype`` that one page holds."""
        if self is Packing.BYTES:
            return page_bytes
        return kernels.mx_page_values(page_bytes) * dtype.itemsize

    def operand(self, buffer: Tensor, dtype: torch.dtype) -> Tensor:
        """The buffer, given as bytes, as the kernels want it."""
        return buffer if self is Packing.BYTES else buffer.view(dtype)

    def width(self, row_bytes: int, dtype: torch.dtype) -> int:
        """A row as the kernels count it."""
        return row_bytes if self is Packing.BYTES else row_bytes // dtype.itemsize

    @property
    def stash(self) -> Callable[..., None]:
        """The kernel that copies into pages."""
        return kernels.stash_pages if self is Packing.BYTES else kernels.stash_mx_pages

    @property
    def restore(self) -> Callable[..., None]:
        """The kernel that copies back."""
        return kernels.restore_pages if self is Packing.BYTES else kernels.restore_mx_pages


def check_compression(compress: Format | None, page_bytes: int) -> None:
    """Refuse a format that pages cannot be packed in.

    Raises:
        ConfigError: It is none of those, or a page is too small for one block.
    """
    if compress is None:
        return
    if compress != MXFP8:
        came = compress.name if isinstance(compress, Format) else repr(compress)
        raise ConfigError(f"values are compressed to MXFP8 or not at all, got {came}")
    if not kernels.mx_page_values(page_bytes):
        raise ConfigError(f"compression needs pages of 64 bytes or more, got {page_bytes}")
