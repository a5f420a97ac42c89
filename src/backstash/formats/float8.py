"""Float8 with one scale for a whole tensor (one for each group of a grouped one).

*Current* scaling takes the scale from the tensor's own largest magnitude.  *Delayed*
scaling is given a scale learnt from earlier tensors, so the cast needs no pass over the
data first; the learning is in ``backstash.recipes.scaling``.  One set of codes serves both
directions, because the scale does not depend on one.

Processes that hold parts of one tensor name their group (``amax_group``): the largest magnitude
is then that of all parts, found when a tensor is quantized (current) or when a step is learnt
from (delayed).  A file does not hold the group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed

from backstash import kernels
from backstash.errors import RecipeError, ShapeError
from backstash.formats.format import (
    BufferSpec,
    Code,
    Format,
    Reading,
    Refill,
    Usage,
    amax_of,
    check_code,
    check_epsilon,
    check_flags,
    fill,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Float8(Format):
    """What both scalings share: the buffers, and how they are read."""

    code: Code = Code.E4M3
    amax_group: Any = None

    any_view: ClassVar[bool] = True
    unstored: ClassVar[tuple[str, ...]] = ("amax_group",)

    def __post_init__(self) -> None:
        check_code(self.code)
        if self.amax_group is not None and not _is_group(self.amax_group):
            raise RecipeError(
                f"amax_group must be a process group of torch.distributed, got "
                f"{self.amax_group!r}; use None to look at this process's tensor alone"
            )

    @property
    def tolerance(self) -> tuple[float, float]:
        return self.code.tolerance

    def buffers(
        self, rows: int, columns: int, dtype: torch.dtype, usage: Usage, groups: int | None
    ) -> dict[str, BufferSpec]:
        return {
            "codes": BufferSpec((rows, columns), torch.uint8),
            "scale_inv": BufferSpec((groups or 1,), torch.float32),
        }

    def decode(self, buffers: Mapping[str, Tensor], reading: Reading) -> Tensor:
        codes, scale_inv = buffers["codes"], buffers["scale_inv"]
        return kernels.dequantize_scaled(
            codes, scale_inv, self.code.dtype, reading.dtype, reading.ends_G
        )

    def valid_rows(self, buffer: str, ends_G: Tensor, rows: int) -> Tensor | None:
        return ends_G[-1:].clamp(max=rows) if buffer == "codes" else None

    def part_rows(self, buffer: str, rows: range, of: int) -> slice | None:
        return slice(rows.start, rows.stop) if buffer == "codes" else None

    def _buffers_from(
        self, x_MK: Tensor, scale: Tensor, ends_G: Tensor | None, refill: Refill | None
    ) -> dict[str, Tensor]:
        into = fill(refill, "codes")
        codes = kernels.quantize_scaled(x_MK, scale, self.code.dtype, ends_G, into=into)
        return {"codes": codes, "scale_inv": torch.ones_like(scale) / scale}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8Current(_Float8):
    """Float8 whose scale comes from the tensor itself.

    ``epsilon`` is the least magnitude taken for the largest; ``power_of_two`` makes scaling
    exact at the cost of up to one bit of range.  With an ``amax_group`` the largest magnitude
    is that of all its processes, each of which must quantize then.
    """

    power_of_two: bool = False
    epsilon: float = 0.0

    name: ClassVar[str] = "float8_current"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_epsilon(self.epsilon)
        check_flags(self, "power_of_two")

    def encode(
        self,
        x_MK: Tensor,
        usage: Usage,
        ends_G: Tensor | None,
        scale: Tensor | None,
        refill: Refill | None = None,
    ) -> dict[str, Tensor]:
        amax = amax_of(x_MK, ends_G, None if refill is None else refill.noop)
        if self.amax_group is not None:
            distributed.all_reduce(amax, distributed.ReduceOp.MAX, group=self.amax_group)
        scale = kernels.scale_from_amax(
            amax,
            largest=self.code.largest,
            power_of_two=self.power_of_two,
            epsilon=self.epsilon,
        )
        return self._buffers_from(x_MK, scale, ends_G, refill)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8Delayed(_Float8):
    """Float8 with a given scale: one, until a history has been seen.

    ``history`` is how many steps are remembered, ``margin`` how many powers of two are left
    above the largest magnitude seen, and ``most_recent`` takes the last step's instead of
    the largest of all.  With an ``amax_group`` a step's largest magnitude is that of all its
    processes, each of which must make the same calls in the same order; to quantize asks nobody.
    """

    history: int = 1024
    margin: int = 0
    most_recent: bool = False

    name: ClassVar[str] = "float8_delayed"
    stateful: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(self, "most_recent")
        if not _is_whole(self.history) or self.history < 1:
            raise RecipeError(
                f"history is how many steps are remembered and must be at least 1, got "
                f"{self.history!r}; use FLOAT8_CURRENT to remember none"
            )
        if not _is_whole(self.margin) or abs(self.margin) > 64:
            raise RecipeError(
                f"margin must be a whole number of powers of two, to 64, got {self.margin!r}"
            )

    def encode(
        self,
        x_MK: Tensor,
        usage: Usage,
        ends_G: Tensor | None,
        scale: Tensor | None,
        refill: Refill | None = None,
    ) -> dict[str, Tensor]:
        groups = 1 if ends_G is None else ends_G.numel()
        if scale is None:
            scale = torch.ones(groups, dtype=torch.float32, device=x_MK.device)
        if scale.shape != (groups,) or scale.dtype != torch.float32:
            raise ShapeError(
                f"{self.name} needs a float32 scale of shape ({groups},), one for each group, "
                f"got {scale.dtype} {tuple(scale.shape)}; reshape or convert it"
            )
        return self._buffers_from(x_MK, scale, ends_G, refill)

    def scale_of(self, buffers: Mapping[str, Tensor]) -> Tensor | None:
        return torch.ones_like(buffers["scale_inv"]) / buffers["scale_inv"]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_group(group: Any) -> bool:
    return distributed.is_available() and isinstance(group, distributed.ProcessGroup)
