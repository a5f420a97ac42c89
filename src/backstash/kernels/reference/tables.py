"""Tables that tell the programs of grouped products their rows, for all of a layer at once.

Where the groups of rows end is on the device, so a small launch before each grouped product writes
down for its programs which rows are theirs.  The products of one layer all have the same groups,
and inside :class:`sharing_tables` one launch writes the tables of all of them.  Each product gets
a table of its own: its programs count in it.  The reference needs no tables.

Letters: G groups.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor


class _Current(threading.local):
    shared: sharing_tables | None = None


_current = _Current()


class sharing_tables:
    """Inside, the products over these groups that run on this thread get tables made together.

    The ends must not change inside.

    Args:
        ends_G: The very tensor that the products are given.
        row_products: How many products of rows by their group's matrix to expect; for more, tables
            are made again.
        column_products: How many gradients of the matrices.
    """

    def __init__(self, ends_G: Tensor, row_products: int, column_products: int = 0) -> None:
        self.ends_G = ends_G
        self.row_products = row_products
        self.column_products = column_products
        #: Tables that nobody has taken yet, by what they are for.
        self.spare: dict[Any, list[Tensor]] = {}

    def __enter__(self) -> None:
        self._before, _current.shared = _current.shared, self

    def __exit__(self, *exception: object) -> None:
        _current.shared = self._before
        self.spare.clear()


def shared_tables(ends_G: Tensor) -> sharing_tables | None:
    """What a product over these groups shares its tables with; None where it does not."""
    shared = _current.shared
    return shared if shared is not None and shared.ends_G is ends_G else None
