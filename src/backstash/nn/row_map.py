"""``RowMap``: which token each row of the experts copies, and which rows each token has.

The two directions of one sort, as ``kernels.sort_by_expert`` gives them.  With it a grouped
module gathers its rows itself and saves the tokens instead: T rows, not T * K.  So a router
of somebody else's needs only to say which experts each token goes to, and with what weights:
``by_expert`` makes the map of it, and ``weights`` brings the weights into the rows' order.  With
``valid`` it fills a buffer of rows, of which only the first are there, and saves those.

Letters: T tokens, K experts a token, R rows, E experts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from backstash import kernels
from backstash.errors import ConfigError, DeviceError, DtypeError, ShapeError
from backstash.nn.options import check_sizes
from backstash.opaque import opaque
from backstash.saving import differentiable_once, save_for_backward, saved_values


@dataclasses.dataclass(frozen=True, eq=False)
class RowMap:
    """``source_R[r]`` is the token of row r; ``slots_TK[t, k]`` is the row of t's k-th copy."""

    source_R: Tensor
    slots_TK: Tensor
    valid: Tensor | None = None
    """int32 ``(1,)``: how many rows are there, where they come from elsewhere into a buffer with
    room for more.  They are copied in, and the copies kept for backward, as if no token were here.
    """

    def __post_init__(self) -> None:
        for name, value, ndim in (("source_R", self.source_R, 1), ("slots_TK", self.slots_TK, 2)):
            if not isinstance(value, Tensor) or value.ndim != ndim:
                came = value.shape if isinstance(value, Tensor) else type(value).__name__
                raise ShapeError(
                    f"{name} must be a tensor of {ndim} dimension(s), got {came}; pass "
                    "what RowMap.by_expert returned"
                )
            if value.dtype not in (torch.int32, torch.int64):
                raise DtypeError(f"{name} must be int32 or int64, got {value.dtype}; use .long()")
        if self.source_R.device != self.slots_TK.device:
            raise DeviceError(
                f"source_R is on {self.source_R.device} and slots_TK on {self.slots_TK.device}; "
                "move one of them"
            )

    @classmethod
    @opaque(reason="rows are sorted by kernels of backstash; leave out fullgraph=True")
    def by_expert(cls, expert_TK: Tensor, num_experts: int) -> tuple[RowMap, Tensor]:
        """Sort the copies of tokens by the expert they go to, ties in the order of tokens.

        Args:
            expert_TK: The experts of each token, int32 or int64 ``(T, K)``.  A number that is
                no expert's is allowed: its copy is in none of the groups, and adds zeros.
            num_experts: E, how many there are.

        Returns:
            The map of ``R = T * K`` rows, and the rows of each expert, int32 ``(E,)`` on the
            device: ``m_splits`` of a grouped module.

        Raises:
            ShapeError, DtypeError: ``expert_TK`` is no matrix of integers.
            ConfigError: there is no expert.
        """
        check_sizes(num_experts=num_experts, least=1)
        if not isinstance(expert_TK, Tensor):
            raise DtypeError(
                f"expert_TK must be an integer tensor (T, K), got {type(expert_TK).__name__}; pass "
                "what topk gave as indices"
            )
        source_R, slots_TK, counts_E = kernels.sort_by_expert(expert_TK, num_experts)
        return cls(source_R, slots_TK), counts_E

    @opaque(reason="weights are sorted by kernels of backstash; leave out fullgraph=True")
    def weights(self, weight_TK: Tensor) -> Tensor:
        """The weight ``(R,)`` of each row, from that of each copy ``(T, K)``; differentiable.

        Raises:
            ShapeError, DtypeError: there is not one number for each copy.
            DeviceError: the weights are on another device.
        """
        if not isinstance(weight_TK, Tensor) or not weight_TK.is_floating_point():
            came = weight_TK.dtype if isinstance(weight_TK, Tensor) else type(weight_TK).__name__
            raise DtypeError(f"weights must be a floating-point tensor, got {came}; use float32")
        if weight_TK.shape != self.slots_TK.shape:
            raise ShapeError(
                f"weights needs one number for each of {tuple(self.slots_TK.shape)} copies, got "
                f"shape {tuple(weight_TK.shape)}; pass the router's weights (T, K)"
            )
        if weight_TK.device != self.slots_TK.device:
            raise DeviceError(
                f"the row map is on {self.slots_TK.device}, the weights are on "
                f"{weight_TK.device}; move one of them"
            )
        return _WeightsToRows.apply(weight_TK, self.slots_TK, self.rows, self.valid)

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
            if self.valid is None:
                _check_range("slots_TK", self.slots_TK, self.rows, "rows")


class _WeightsToRows(torch.autograd.Function):
    """The weight of each row, of which there is one for each copy; and back.

    A copy without a row, or with one that is not ``valid``, gets a gradient of zero.
    """

    @staticmethod
    def forward(
        ctx: Any, weight_TK: Tensor, slots_TK: Tensor, rows: int, valid: Tensor | None
    ) -> Tensor:
        save_for_backward(ctx, slots_TK, valid)
        return kernels.weights_to_rows(weight_TK, slots_TK, rows)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (dweight_R,) = grads
        slots_TK, valid = saved_values(ctx)
        return kernels.weights_to_copies(dweight_R, slots_TK, valid), None, None, None


def _check_range(name: str, index: Tensor, count: int, what: str) -> None:
    if not index.numel() or type(index) is not Tensor:
        return  # what stands for indices while a program is exported has no values
    least, most = (int(value) for value in index.aminmax())
    if least < 0 or most >= count:
        raise ConfigError(
            f"{name} must name {what} from 0 to {count - 1}, got {least} to {most}; pass what "
            "RowMap.by_expert returned for these tokens"
        )
