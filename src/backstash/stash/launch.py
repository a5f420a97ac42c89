"""What one launch puts into pages, and what is known of it afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from backstash import kernels
from backstash.kernels import Moves
from backstash.stash.admission import Account
from backstash.stash.memory import Memory
from backstash.stash.streams import Event


class Buffer(NamedTuple):
    """What is to be stashed: bytes, or values to compress; its valid rows; elements of a row."""

    data: Tensor
    rows: Tensor
    width: int


class Matrices(NamedTuple):
    """What a node wants places for: matrices of the same groups of rows, so many columns each."""

    columns: Sequence[int]
    dtype: torch.dtype
    rows: int
    ends_G: Tensor

    def widths(self, page_bytes: int) -> list[int]:
        """How many slabs wide each is."""
        width = kernels.slab_width(self.dtype, page_bytes)
        return [columns // width for columns in self.columns]

    def pages(self, page_bytes: int) -> int:
        """Pages that they take at most."""
        return kernels.slabs_for(self.rows, len(self.ends_G)) * sum(self.widths(page_bytes))


@dataclasses.dataclass(kw_only=True, eq=False)
class Launch:
    """Buffers that were stashed together.

    Attributes:
        table: Where their bytes went.
        buffers: How many there are.
        account: What the ledger counts for them; None where nobody watches.
        done: Behind the copy, or behind its list of moves until that is finished.
        captured: Was it recorded into a CUDA graph?
        reads: Behind each reading of its pages; they are given back behind all of them.
        memory: The pool's memory that it lies in.
        moves: What has been left to matmuls, until it is finished.
        is_on_device: Has it no page in host memory?  So it is where it was admitted with room on
            the device, and where there is no other memory.
    """

    table: Tensor
    buffers: int
    account: Account | None
    done: Event
    captured: bool
    memory: Memory
    reads: list[Event] = dataclasses.field(default_factory=list)
    moves: Moves | None = None

    @property
    def is_on_device(self) -> bool:
        if self.memory.host_pages.numel() == 0:
            return True
        return self.account is not None and self.account.is_on_device
