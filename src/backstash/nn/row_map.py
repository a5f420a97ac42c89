"""``RowMap``: which token each row of the experts copies, and which rows each token has.

The two directions of one sort, as ``kernels.sort_by_expert`` gives them.  With it a grouped
module gathers its rows itself and saves the tokens instead: T rows, not T * K.

Letters: T tokens, K experts a token, R rows.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from backstash.errors import ConfigError, DeviceError, DtypeError, ShapeError


@dataclasses.dataclass(frozen=True, eq=False)
class RowMap:
    """``source_R[r]`` is the token of row r; ``slots_TK[t, k]`` is the row of t's k-th copy."""

    source_R: Tensor
    slots_TK: Tensor

    def __post_init__(self) -> None:
        for name, value, ndim in (("source_R", self.source_R, 1), ("slots_TK", self.slots_TK, 2)):
            if not isinstance(value, Tensor) or value.ndim != ndim:
                came = value.shape if isinstance(value, Tensor) else type(value).__name__
                raise ShapeError(
                    f"{name} must be a tensor of {ndim} dimension(s), got {came}; pass "
                    "what kernels.sort_by_expert returned"
                )
            if value.dtype not in (torch.int32, torch.int64):
                raise DtypeError(f"{name} must be int32 or int64, got {value.dtype}; use .long()")
        if self.source_R.device != self.slots_TK.device:
            raise DeviceError(
                f"source_R is on {self.source_R.device} and slots_TK on {self.slots_TK.device}; "
                "move one of them"
            )

    @property
    def rows(self) -> int:
        """R, the number of rows that are gathered."""
        return self.source_R.shape[0]

    def check(self, x_TH: Tensor) -> None:
        """Refuse tokens that the map was not made for.

        Raises:
            ShapeError, DeviceError: another number of tokens, or another device.
            ConfigError: a token or a row that is not there; on a GPU, whose indices are not
                read on the host, they are not checked.
        """
        if self.slots_TK.shape[0] != x_TH.shape[0]:
            raise ShapeError(
                f"the row map is for {self.slots_TK.shape[0]} tokens, got {x_TH.shape[0]}; make "
                "it from the same tokens"
            )
        if self.source_R.device != x_TH.device:
            raise DeviceError(
                f"the row map is on {self.source_R.device}, the tokens are on {x_TH.device}; "
                "move one of them"
            )
        if x_TH.device.type == "cpu":
            _check_range("source_R", self.source_R, x_TH.shape[0], "tokens")
            _check_range("slots_TK", self.slots_TK, self.rows, "rows")


def _check_range(name: str, index: Tensor, count: int, what: str) -> None:
    if not index.numel() or type(index) is not Tensor:
        return  # what stands for indices while a program is exported has no values
    least, most = (int(value) for value in index.aminmax())
    if least < 0 or most >= count:
        raise ConfigError(
            f"{name} must name {what} from 0 to {count - 1}, got {least} to {most}; pass what "
            "kernels.sort_by_expert returned for these tokens"
        )
