"""Some rows of a quantized tensor, as a tensor that shares its memory.

A format says where in each buffer rows lie.  Codes and scales of lines along a row are that row's
own.  Blocks down the rows and tiles can be cut between blocks only.  What all rows share, such as
the one scale of a tensor, is shared by a part too: it can be read, and since writing it would
change what the other rows mean, such a part is not written.  What is not by itself in a buffer,
such as rows of NVFP4's transposed columns, is refused, and never dequantized instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from backstash.errors import LayoutError
from backstash.tensors.quantized import QuantizedTensor


def part(source: QuantizedTensor, view: Tensor) -> QuantizedTensor:
    """The rows that ``view`` is of a plain, contiguous tensor of the same shape.

    Raises:
        LayoutError: They are not whole rows that lie one after another, or the format cannot
            show them by themselves.
    """
    rows, of = _rows(source, view), source.shape[:-1].numel()
    if rows == range(of):
        return source.like(source.buffers, shape=view.shape)
    if source.ends_G is not None:
        raise LayoutError(
            f"a {source.format.name} tensor of groups of rows is not cut by rows; take "
            f"GroupedTensor.members(), or dequantize() first"
        )
    cuts = {name: source.format.part_rows(name, rows, of) for name in source.buffers}
    with views_count_writes():
        buffers = {
            name: buffer if (cut := cuts[name]) is None else buffer[cut]
            for name, buffer in source.buffers.items()
        }
    shared = tuple(name for name, cut in cuts.items() if cut is None or name in source.shared)
    return source.like(buffers, shape=view.shape, shared=shared)


def _rows(source: QuantizedTensor, view: Tensor) -> range:
    name, shape, columns = source.format.name, tuple(source.shape), source.shape[-1]
    start, rest = divmod(int(view.storage_offset()), max(columns, 1))
    if view.ndim == 0 or view.shape[-1] != columns or rest or not view.is_contiguous():
        raise LayoutError(
            f"what was asked of a {name} tensor of shape {shape} has shape {tuple(view.shape)} and "
            f"is not whole rows that lie one after another; take a range of the first dimension, "
            f"or dequantize() first"
        )
    return range(start, start + view.shape[:-1].numel())


@contextlib.contextmanager
def views_count_writes() -> Iterator[None]:
    """Let views that are made inside count writes together with the tensor they view.

    Inside of a dispatched operation they would count alone, and autograd, which may have saved
    the whole buffer, would not see that a part of it was written.
    """
    key = torch._C.DispatchKey.ADInplaceOrView
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(include, exclude.remove(key)):
        yield
