"""A shard as ``torch.distributed.checkpoint`` knows it: some chunks of a whole tensor.

The state dict of a sharded model holds :class:`ShardView`, plain tensors of the shards' own
memory that also say which rows of the whole they are.  So a checkpoint holds whole weights,
whoever wrote which part, and is read by any number of ranks, or by a model that is not
sharded at all.

Rows of ``(G, N, K)`` cut anywhere are up to three boxes: the rest of one expert, whole
experts, and the beginning of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from backstash.weights.layout import Layout


class ShardView(Tensor):
    """The rows of one rank, with the layout of the whole."""

    cut: Layout
    rank: int
    #: The rows that are here, as a plain tensor of the same memory.
    rows: Tensor

    @classmethod
    def of(cls, shard: Tensor, cut: Layout, rank: int) -> ShardView:
        """View a shard, or anything of its shape: an optimizer's moments, say."""
        self = torch.Tensor._make_subclass(cls, shard)
        self.cut = cut
        self.rank = rank
        self.rows = shard.detach().as_subclass(Tensor)
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Results are plain, except for the memory that a checkpoint is staged in."""
        view: Any = args[0] if args else None
        if isinstance(view, ShardView) and view._is_staged_by(func, args[1:]):
            device = (kwargs or {}).get("device", view.device)
            return cls.of(torch.zeros_like(view.rows, device=device), view.cut, view.rank)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def _is_staged_by(self, func: Any, sizes: tuple[Any, ...]) -> bool:
        """Does ``async_save`` ask for memory here, to copy a state dict into and write the copy?"""
        if func is torch.zeros_like:
            return True
        return func is Tensor.new_empty and sizes == (self.size(),)

    def data_ptr(self) -> int:
        """None: to torch, which stages checkpoints, this is a tensor that wraps another.

        One with memory of its own would be staged as a tensor of the whole's size.
        """
        return 0

    def size(self, dim: int | None = None) -> Any:
        """That of the whole: what a checkpoint compares with what it holds.

        ``shape`` stays that of the rows that are here, which a module compares with its own.
        """
        return self.cut.shape if dim is None else self.cut.shape[dim]

    def _boxes(self) -> list[tuple[tuple[int, ...], Tensor]]:
        """Where each piece begins in the whole, and the piece."""
        start, end = self.cut.cuts[self.rank : self.rank + 2]
        rows = self.rows.reshape(end - start, self.cut.columns)
        if self.cut.groups is None:
            return [((start, 0), rows)] if len(rows) else []
        N, K = self.cut.shape[1:]
        return [
            ((first // N, first % N, 0), rows[first - start : last - start].view(-1, height, K))
            for first, last, height in _spans(start, end, N)
        ]

    # Half a second of imports that only a checkpoint needs: they are made by the methods.

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=piece.shape)
            for offsets, piece in self._boxes()
        ]

    def __create_write_items__(self, name: str, tensor: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.rows)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=properties, size=self.cut.shape
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        wanted = tuple(index.offset or ())
        return next(piece for offsets, piece in self._boxes() if offsets == wanted)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # In a file of this rank alone it is what it holds.
        return self.rows.__reduce_ex__(protocol)


def _spans(start: int, end: int, N: int) -> Iterator[tuple[int, int, int]]:
    """Runs of rows that are boxes of ``(G, N, K)``: first row, end, and rows of an expert in it."""
    while start < end:
        inside = start % N
        if inside or end - start < N:
            last = min(end, start - inside + N)
            yield start, last, last - start
        else:
            last = end - end % N
            yield start, last, N
        start = last
