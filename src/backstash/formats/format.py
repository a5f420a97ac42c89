"""What a number format is: a frozen value that turns floats into bytes and back.

A *usage* says along which direction of a matrix the values of one block lie: ``ROWWISE``
along the last dimension, as a forward matmul reads it, or ``COLUMNWISE`` down the rows, as
the matmul of a weight gradient reads it.  A format *encodes* a matrix into named buffers
and *decodes* them; it knows each buffer's shape, so bytes are a formula, and how many rows
of each buffer are real when the matrix is a batch of groups in a larger buffer.

Letters: M rows (all leading dimensions flattened), K the last dimension, G groups.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from backstash import kernels
from backstash.errors import DtypeError, LayoutError, RecipeError, ShapeError

HIGH_PRECISION_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Usage(enum.Flag):
    """Along which directions a quantized matrix can be read."""

    ROWWISE = enum.auto()
    COLUMNWISE = enum.auto()
    BOTH = ROWWISE | COLUMNWISE

    # A graph that is compiled can ask these of a usage, and not what is in a flag.
    @property
    def has_rows(self) -> bool:
        """Whether it can be read along rows."""
        return Usage.ROWWISE in self

    @property
    def has_columns(self) -> bool:
        """Whether it can be read down columns."""
        return Usage.COLUMNWISE in self

    @property
    def sides(self) -> tuple[Usage, ...]:
        """The directions one by one."""
        return tuple(self)


class Code(enum.Enum):
    """An 8-bit float: its torch dtype, largest value and the tolerance of one rounding."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self is Code.E4M3 else torch.float8_e5m2

    @property
    def largest(self) -> float:
        return torch.finfo(self.dtype).max

    @property
    def tolerance(self) -> tuple[float, float]:
        """Relative and absolute tolerance of values that were rounded to this code."""
        return (0.125, 0.0675) if self is Code.E4M3 else (0.25, 0.125)


@dataclasses.dataclass(frozen=True)
class BufferSpec:
    """Shape and dtype of one buffer of an encoded matrix."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Reading:
    """What to read of an encoded matrix: its shape, along which direction, into which dtype."""

    rows: int
    columns: int
    dtype: torch.dtype
    usage: Usage
    ends_G: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Refill:
    """Buffers that are there already, for new values; left alone where ``noop`` is set.

    ``noop`` is a float32 or int32 number in a tensor on the buffers' device, read there.
    """

    buffers: Mapping[str, Tensor]
    noop: Tensor | None = None

    def __post_init__(self) -> None:
        kernels.Into(tuple(self.buffers.values()), self.noop)  # refuses what cannot be filled


def fill(refill: Refill | None, *names: str) -> kernels.Into | None:
    """Where a kernel writes the buffers of these names; None: into fresh memory."""
    if refill is None:
        return None
    return kernels.Into(tuple(refill.buffers[name] for name in names), refill.noop)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format(abc.ABC):
    """How a matrix of floats is kept: which buffers, how they are made and read.

    Subclasses are final and frozen; a variant is a new value
    (``dataclasses.replace(FLOAT8_CURRENT, power_of_two=True)``).
    """

    #: Makes the quantized tensor; set by ``backstash.tensors``, which imports this package.
    wrap: ClassVar[Callable[..., Any]]
    #: The name by which recipes and saved files know the format.
    name: ClassVar[str]
    #: Whether a view with another last dimension can share the buffers.
    any_view: ClassVar[bool] = False
    #: Whether a quantized matrix depends on a scale learnt from earlier ones.
    stateful: ClassVar[bool] = False
    #: Fields that say how to quantize here and now, and that no file can hold.
    unstored: ClassVar[tuple[str, ...]] = ()

    def quantize(self, x: Any, usage: Usage = Usage.ROWWISE, *, scale: Tensor | None = None) -> Any:
        """A tensor, or a ``GroupedTensor``, kept in this format.

        Args:
            x: Values of any floating dtype and shape; the last dimension is K.
            usage: The directions that can be read from the result.
            scale: Float32 ``(1,)`` or ``(G,)``; only for formats with a learnt scale.

        Returns:
            A ``QuantizedTensor`` of the shape and dtype of ``x``; a ``GroupedTensor`` of
            one where ``x`` is a ``GroupedTensor``.

        Raises:
            DtypeError: ``x`` is not a floating tensor.
            LayoutError: ``usage`` is empty, or a scale is given to a format without one.
        """
        if not isinstance(usage, Usage) or not usage:
            raise LayoutError(
                f"{self.name}.quantize needs usage ROWWISE, COLUMNWISE or BOTH, got {usage!r}"
            )
        if scale is not None and not self.stateful:
            raise LayoutError(
                f"{self.name} computes its own scales and takes none; leave `scale` out, "
                f"or use FLOAT8_DELAYED"
            )
        return type(self).wrap(x, format=self, usage=usage, scale=scale)

    @property
    @abc.abstractmethod
    def tolerance(self) -> tuple[float, float]:
        """Relative and absolute tolerance of a round trip."""

    @property
    def rtol(self) -> float:
        """Relative tolerance of a round trip."""
        return self.tolerance[0]

    @property
    def atol(self) -> float:
        """Absolute tolerance of a round trip."""
        return self.tolerance[1]

    @abc.abstractmethod
    def buffers(
        self, rows: int, columns: int, dtype: torch.dtype, usage: Usage, groups: int | None
    ) -> dict[str, BufferSpec]:
        """Each buffer of an encoded ``(rows, columns)`` matrix, in a fixed order."""

    @abc.abstractmethod
    def encode(
        self,
        x_MK: Tensor,
        usage: Usage,
        ends_G: Tensor | None,
        scale: Tensor | None,
        refill: Refill | None = None,
    ) -> dict[str, Tensor]:
        """The buffers that :meth:`buffers` names: fresh ones, or those of ``refill``, filled.

        A buffer that a format does not fill itself comes back fresh, whatever ``refill`` says.
        """

    @abc.abstractmethod
    def decode(self, buffers: Mapping[str, Tensor], reading: Reading) -> Tensor:
        """Values ``(rows, columns)``, read along ``reading.usage``, which is one direction."""

    @abc.abstractmethod
    def valid_rows(self, buffer: str, ends_G: Tensor, rows: int) -> Tensor | None:
        """How many rows of a grouped buffer are real, int ``(1,)``; None: all of them."""

    @abc.abstractmethod
    def part_rows(self, buffer: str, rows: range, of: int) -> slice | None:
        """Which rows of a buffer hold these rows of a matrix of ``of``; None: they share all of it.

        Raises:
            LayoutError: They are not by themselves in the buffer.
        """

    @property
    def serves_both(self) -> bool:
        """Whether one set of codes serves both directions, and so gives the same values."""
        return self.any_view

    @property
    def has_lone_rows(self) -> bool:
        """Whether the codes of a row depend on that row alone, so that a copy has the same."""
        return False

    def scale_of(self, buffers: Mapping[str, Tensor]) -> Tensor | None:
        """The scale with which new values are quantized into existing buffers."""
        return None

    def saved_bytes(
        self,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        usage: Usage = Usage.ROWWISE,
        groups: int | None = None,
    ) -> int:
        """Bytes of all buffers of a ``(rows, columns)`` matrix, in ``groups`` groups if given.

        Raises:
            ShapeError: A count is no whole number, or negative.
            DtypeError: ``dtype`` is none that can be quantized.
            LayoutError: ``usage`` is empty.
        """
        for name, count in (("rows", rows), ("columns", columns), ("groups", groups or 0)):
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise ShapeError(f"{name} must be a whole number, got {count!r}; pass a count")
        if dtype not in HIGH_PRECISION_DTYPES:
            raise DtypeError(
                f"saved_bytes needs the dtype of the values, got {dtype!r}; pass float32, "
                f"bfloat16, float16 or float64"
            )
        if not isinstance(usage, Usage) or not usage:
            raise LayoutError(f"saved_bytes needs ROWWISE, COLUMNWISE or BOTH, got {usage!r}")
        specs = self.buffers(rows, columns, dtype, usage, groups)
        return sum(spec.nbytes for spec in specs.values())

    def along(self, usage: Usage) -> Format:
        """The format of one direction; another one only where a format is made of two."""
        return self

    def buffers_along(self, buffers: Mapping[str, Tensor], usage: Usage) -> Mapping[str, Tensor]:
        """Buffers of one direction, by the names that its format gives them."""
        return buffers

    def spec(self) -> dict[str, Any]:
        """The format as plain values, for files; :func:`backstash.formats.from_spec` reads it."""
        names = [field.name for field in dataclasses.fields(self)]
        stored = {name: getattr(self, name) for name in names if name not in self.unstored}
        return {"name": self.name, **{name: _plain(value) for name, value in stored.items()}}


def amax_of(x_MK: Tensor, ends_G: Tensor | None, noop: Tensor | None = None) -> Tensor:
    """Largest magnitude of a matrix, float32 ``(1,)``, or of each of its groups, ``(G,)``."""
    if ends_G is None:
        return kernels.amax(x_MK, noop=noop)
    return kernels.group_amax(x_MK, ends_G, noop=noop)


def whole_blocks(format: str, block: int, rows: range, of: int) -> slice:
    """Which blocks of rows these rows of a matrix of ``of`` are.

    Raises:
        LayoutError: They begin or end inside of a block.
    """
    if rows and (rows.start % block or (rows.stop % block and rows.stop != of)):
        raise LayoutError(
            f"rows {rows.start} to {rows.stop} of a {format} tensor of {of} rows cut its blocks of "
            f"{block} rows; take multiples of {block} (lines of the rowwise usage alone can be cut "
            f"anywhere), or dequantize() first"
        )
    first = rows.start // block
    return slice(first, first + -(-len(rows) // block))


def _plain(value: Any) -> Any:
    if isinstance(value, Format):
        return value.spec()
    return value.value if isinstance(value, enum.Enum) else value


def check_code(code: Any) -> None:
    """Refuse what is not one of the 8-bit floats."""
    if not isinstance(code, Code):
        raise RecipeError(f"code must be Code.E4M3 or Code.E5M2, got {code!r}")


def check_flags(format: Format, *names: str) -> None:
    """Refuse a switch of a format that is neither on nor off."""
    for name in names:
        if not isinstance(getattr(format, name), bool):
            raise RecipeError(f"{name} must be True or False, got {getattr(format, name)!r}")


def check_epsilon(epsilon: float) -> None:
    """Refuse a least magnitude that is none."""
    is_number = isinstance(epsilon, int | float) and not isinstance(epsilon, bool)
    if not is_number or not 0 <= epsilon < math.inf:
        raise RecipeError(
            f"epsilon is the least magnitude taken for the largest and must be finite and "
            f"not negative, got {epsilon!r}; use 0 for none"
        )


def check_floating(x: Tensor, who: str) -> None:
    """Refuse what is not a tensor of floats with a last dimension."""
    if not isinstance(x, Tensor) or x.dtype not in HIGH_PRECISION_DTYPES:
        came = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise DtypeError(
            f"{who} needs a tensor of float32, bfloat16, float16 or float64, got {came}; "
            f"convert it first"
        )
    if x.ndim == 0:
        raise ShapeError(f"{who} needs at least one dimension, got a scalar; reshape it to (1,)")
