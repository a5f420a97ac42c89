"""Which rows of a weight each rank holds.

A weight ``(N, K)`` or ``(G, N, K)`` is seen as a matrix of rows of K values, those of all
experts one after another.  Rank r holds the rows from ``cuts[r]`` to ``cuts[r + 1]``: always
whole rows, always one piece, in rank order.  So the shards of all ranks one after another
*are* the weight, and gathering is copying nothing twice.

Shards are as even as they can be and no more is asked of them: with 5 rows on 4 ranks they
have 2, 2, 1 and 0.  Two things move a cut.  Weights split by expert are cut between experts.
And a format that shares a scale between rows of a column (``block`` of them) is cut between
such blocks, so that every block is whole on one rank and quantizing a shard is quantizing
the weight.

Letters: M rows of the whole weight, N rows of one expert, K columns, G experts.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools

import torch
from torch import Tensor

from backstash.errors import ShapeError
from backstash.tensors import equal_groups


class Split(enum.Enum):
    """Where a weight of several experts may be cut."""

    EXPERTS = "experts"  # between experts: a shard is (experts, N, K)
    ROWS = "rows"  # between any two rows: a shard is (rows, K)
    AUTO = "auto"  # between experts where they divide evenly, else between rows


@dataclasses.dataclass(frozen=True)
class Layout:
    """The cut of one weight.

    Attributes:
        shape: Of the whole weight, ``(N, K)`` or ``(G, N, K)``.
        cuts: Row where each rank's shard begins, and at last M.
        split: Never ``AUTO``.
    """

    shape: torch.Size
    cuts: tuple[int, ...]
    split: Split

    @classmethod
    def even(
        cls, shape: torch.Size, ranks: int, *, split: Split = Split.AUTO, block: int = 1
    ) -> Layout:
        """Cut as evenly as whole rows, experts or blocks of rows allow.

        Raises:
            ShapeError: ``shape`` is not that of one weight or of several.
        """
        if len(shape) not in (2, 3):
            raise ShapeError(
                f"a weight to shard has shape (N, K) or (G, N, K), got {tuple(shape)}; choose "
                "other parameters with filter="
            )
        if len(shape) == 2:
            return cls(shape, _equal_cuts(shape[0], ranks, block), Split.ROWS)
        G, N, _ = shape
        if split is Split.AUTO:
            split = Split.ROWS if G % ranks else Split.EXPERTS
        if split is Split.EXPERTS:
            cuts = tuple(cut * N for cut in _equal_cuts(G, ranks, 1))
        elif N % block == 0:
            cuts = _equal_cuts(G * N, ranks, block)
        else:
            cuts = tuple(_block_start(rank * G * N // ranks, N, block) for rank in range(ranks))
            cuts = (*cuts, G * N)
        return cls(shape, cuts, split)

    @functools.cached_property
    def rows(self) -> int:
        """M, rows of the whole weight."""
        return self.cuts[-1]

    @functools.cached_property
    def columns(self) -> int:
        """K."""
        return self.shape[-1]

    @functools.cached_property
    def groups(self) -> int | None:
        """G, or None where the weight is a single matrix."""
        return self.shape[0] if len(self.shape) == 3 else None

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """Rows of each rank."""
        return tuple(end - start for start, end in itertools.pairwise(self.cuts))

    def shard_shape(self, rank: int) -> torch.Size:
        """Shape of one rank's shard."""
        rows = self.counts[rank]
        if self.split is Split.ROWS:
            return torch.Size((rows, self.columns))
        return torch.Size((rows // max(self.shape[1], 1), *self.shape[1:]))

    def shard(self, full: Tensor, rank: int) -> Tensor:
        """One rank's rows of the whole weight, as a view."""
        rows = full.reshape(self.rows, self.columns)[self.cuts[rank] : self.cuts[rank + 1]]
        return rows.view(self.shard_shape(rank))

    def ends(self, device: torch.device) -> Tensor | None:
        """Running ends ``(G,)`` of the experts in the whole weight; None for a single matrix."""
        if self.groups is None:
            return None
        return equal_groups(self.groups, self.shape[1], device)

    def shard_ends(self, rank: int, device: torch.device) -> Tensor | None:
        """The same within one rank's shard, where most experts are empty."""
        ends_G = self.ends(device)
        if ends_G is None:
            return None
        return (ends_G - self.cuts[rank]).clamp(0, self.counts[rank])


def _equal_cuts(units: int, ranks: int, block: int) -> tuple[int, ...]:
    chunk = -(-units // ranks)
    chunk = -(-chunk // block) * block
    return tuple(min(rank * chunk, units) for rank in range(ranks + 1))


def _block_start(row: int, N: int, block: int) -> int:
    """The nearest row not after ``row`` where a block of its expert begins."""
    return row - row % N % block
