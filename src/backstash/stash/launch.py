"""What one launch puts into pages, and what is known of it afterwards."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from torch import Tensor

from backstash.kernels import Moves
from backstash.stash.admission import Account
from backstash.stash.memory import Memory
from backstash.stash.streams import Event


class Buffer(NamedTuple):
    """What is to be stashed: bytes, or values to compress; its valid rows; elements of a row."""

    data: Tensor
    rows: Tensor
    width: int


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
