"""``QuantizedTensor``: a matrix kept in a number format, as one real ``torch.Tensor``.

The tensor has the shape, dtype and device of the values it stands for, but no storage of
its own: what it holds are the format's buffers, bytes mostly, as matrices ``(M, K)`` with
all leading dimensions flattened.  The buffers are attributes, listed by
``__tensor_flatten__``, so anything that knows the protocol of wrapper subclasses can take
it apart and put it together.  What may be done with it is the table in
``backstash.tensors.dispatch``; everything else raises, and nothing dequantizes silently.

Letters: M rows, K columns, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from backstash.errors import DtypeError, LayoutError, UnsupportedOpError
from backstash.formats import Format, Reading, Usage, check_floating, from_spec
from backstash.formats.format import HIGH_PRECISION_DTYPES, Refill
from backstash.kernels import Into

_DATA: Any = Tensor.data


class QuantizedTensor(Tensor):
    """Values kept in a :class:`~backstash.formats.Format`.

    Made by ``format.quantize(x)``.  ``dequantize()`` gives the values back as a new plain
    tensor.  Blocks of rows start anew in each group where ``ends_G`` is given.
    """

    format: Format
    usage: Usage
    ends_G: Tensor | None
    #: Names of the buffers that rows outside of this tensor share: it is a part of another.
    shared: tuple[str, ...]
    _names: tuple[str, ...]

    @staticmethod
    def __new__(
        cls,
        buffers: Mapping[str, Tensor],
        *,
        format: Format,
        usage: Usage,
        shape: torch.Size,
        dtype: torch.dtype,
        ends_G: Tensor | None = None,
        shared: tuple[str, ...] = (),
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        first = next(iter(buffers.values()))
        self = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, shape, dtype=dtype, device=first.device, requires_grad=requires_grad
        )
        self.format = format
        self.usage = usage
        self.ends_G = ends_G
        self.shared = shared
        self._names = tuple(buffers)
        for name, buffer in buffers.items():
            setattr(self, name, buffer)
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """All is done in ``__new__``."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @classmethod
    def quantize(
        cls, x: Tensor, *, format: Format, usage: Usage, ends_G: Tensor | None, scale: Tensor | None
    ) -> QuantizedTensor:
        """Encode ``x``; this is what ``format.quantize`` calls.

        A tensor of three or more dimensions is not split by them: its leading dimensions are
        rows like any others.  Groups are given by ``ends_G``.
        """
        check_floating(x, f"{format.name}.quantize")
        if x.layout is not torch.strided or x.is_nested:
            raise LayoutError(
                f"{format.name}.quantize needs a dense matrix of rows, got a "
                f"{'nested' if x.is_nested else x.layout} tensor; make it dense, or describe its "
                f"rows with a GroupedTensor"
            )
        if isinstance(x, QuantizedTensor):
            raise UnsupportedOpError(
                f"{format.name}.quantize needs plain values, got a tensor that is already "
                f"{x.format.name}; call .dequantize() on it first"
            )
        with torch.no_grad():
            x_MK = x.detach().reshape(_rows(x.shape), x.shape[-1])
            buffers = format.encode(x_MK, usage, ends_G, scale)
        return cls(buffers, format=format, usage=usage, shape=x.shape, dtype=x.dtype, ends_G=ends_G)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The format's buffers by name."""
        return {name: getattr(self, name) for name in self._names}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def dequantize(self, usage: Usage | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a new plain tensor.

        Args:
            usage: Which direction's codes to read; default the rows if there, else the columns.
            dtype: Of the result; default the tensor's own.

        Raises:
            LayoutError: The tensor was not quantized for this direction.
            DtypeError: ``dtype`` is no floating dtype.
        """
        if dtype is not None and dtype not in HIGH_PRECISION_DTYPES:
            raise DtypeError(
                f"dequantize gives float32, bfloat16, float16 or float64, got {dtype!r}; convert "
                f"its result"
            )
        if usage is None:
            usage = Usage.ROWWISE if self.usage.has_rows else Usage.COLUMNWISE
        if usage not in self.usage.sides:
            raise LayoutError(
                f"dequantize reads one direction of {self.usage}, got {usage}; quantize with "
                f"the usage you need, or leave `usage` out"
            )
        with torch.no_grad():
            rows, columns = _rows(self.shape), self.shape[-1]
            reading = Reading(rows, columns, dtype or self.dtype, usage, self.ends_G)
            values_MK = self.format.decode(self.buffers, reading)
        return values_MK.reshape(self.shape)

    def only(self, usage: Usage) -> QuantizedTensor:
        """The same tensor readable along ``usage`` alone; the other direction's buffers are let go.

        Raises:
            LayoutError: The tensor was not quantized for this direction.
        """
        if not isinstance(usage, Usage) or not usage or usage not in self.usage:
            raise LayoutError(
                f"only({usage}) was asked of a tensor that has {self.usage}; quantize with the "
                f"usage you need"
            )
        groups = None if self.ends_G is None else self.ends_G.numel()
        rows = _rows(self.shape)
        names = self.format.buffers(rows, self.shape[-1], self.dtype, usage, groups)
        shared = tuple(name for name in self.shared if name in names)
        return self.like({name: getattr(self, name) for name in names}, usage=usage, shared=shared)

    def like(self, buffers: Mapping[str, Tensor], **changes: Any) -> QuantizedTensor:
        """A tensor of the same kind around other buffers; ``changes`` name what differs."""
        kind = {
            "format": self.format,
            "usage": self.usage,
            "shape": self.shape,
            "dtype": self.dtype,
            "ends_G": self.ends_G,
            "shared": self.shared,
        }
        return type(self)(buffers, **(kind | changes))

    def requantize_(self, values: Tensor, *, noop: Tensor | None = None) -> QuantizedTensor:
        """Put new values of the same shape into the same buffers.

        Under a CUDA graph a weight is quantized in every step, also where it has not changed.
        ``noop`` says so on the device: where it is not zero, the buffers stay as they are, and
        the values are not even read, except by NVFP4 with ``row_scaled``.  A step that replays
        the graph sets it without being captured anew, for example
        ``noop.fill_(not first_microbatch)``.

        Args:
            values: Plain values of the tensor's shape, of any floating dtype.
            noop: Float32 or int32 of one element, on the tensor's device.

        Raises:
            LayoutError: Rows outside of this part share some of the buffers, or ``noop`` is
                not one number.
        """
        self.check_whole()
        values_MK = values.detach().to(self.device).reshape(_rows(self.shape), self.shape[-1])
        scale = self.format.scale_of(self.buffers)
        refill = Refill(self.buffers, noop)
        fresh = self.format.encode(values_MK, self.usage, self.ends_G, scale, refill)
        self.write_(fresh, noop=noop)
        if not self.is_inference():
            torch.autograd.graph.increment_version(self)
        return self

    def write_(self, fresh: Mapping[str, Tensor], *, noop: Tensor | None = None) -> QuantizedTensor:
        """Put other bytes into the same buffers; with ``noop`` as in :meth:`requantize_`.

        Raises:
            LayoutError: Rows outside of this part share some of them.
        """
        self.check_whole()
        for name, buffer in self.buffers.items():
            if fresh[name] is not buffer:
                Into((buffer,), noop).write(fresh[name])
            # Inside a dispatched operation nobody counts changes, and autograd, which may
            # have saved the buffer, must see this one.
            if not buffer.is_inference():
                torch.autograd.graph.increment_version(buffer)
        return self

    def check_whole(self) -> None:
        """Refuse to write where rows outside of this part would change their values.

        Raises:
            LayoutError: There are such rows.
        """
        if self.shared:
            raise LayoutError(
                f"rows of a {self.format.name} tensor that share {', '.join(self.shared)} with "
                f"others are not written on their own; write the whole tensor, or clone() the rows"
            )

    @property
    def data(self) -> QuantizedTensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The same buffers, outside of any graph."""
        return _DATA.__get__(self)

    @data.setter
    def data(self, other: Tensor) -> None:
        """Take the buffers of another: torch would exchange shape and dtype only."""
        if not isinstance(other, QuantizedTensor):
            raise UnsupportedOpError(
                f"the data of a QuantizedTensor are buffers of {self.format.name}, got a "
                f"{type(other).__name__}; write values with copy_(), or assign a quantized tensor"
            )
        _DATA.__set__(self, other)
        for name in set(self._names) - set(other._names):
            delattr(self, name)
        self.format, self.usage, self.ends_G = other.format, other.usage, other.ends_G
        self._names, self.shared = other._names, other.shared
        for name, buffer in other.buffers.items():
            setattr(self, name, buffer)

    def share_memory_(self) -> QuantizedTensor:
        """Move every buffer to memory that processes share."""
        for buffer in (*self.buffers.values(), self.ends_G):
            if buffer is not None:
                buffer.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether every buffer is in memory that processes share."""
        return all(buffer.is_shared() for buffer in self.buffers.values())

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names = list(self._names) + (["ends_G"] if self.ends_G is not None else [])
        return names, (self.format, self.usage, self.dtype, self.shared, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], kind: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> QuantizedTensor:
        format, usage, dtype, shared, requires_grad = kind
        buffers = dict(inner)
        ends_G = buffers.pop("ends_G", None)
        return QuantizedTensor(
            buffers,
            format=format,
            usage=usage,
            shape=outer_size,
            dtype=dtype,
            ends_G=ends_G,
            shared=shared,
            requires_grad=requires_grad,
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls.run_operation(func, args, kwargs or {})

    #: Looks an operation up and runs it; set by ``backstash.tensors.dispatch``.
    run_operation: Any

    def __reduce_ex__(self, protocol: Any) -> Any:
        ends = {} if self.ends_G is None else {"ends_G": self.ends_G}
        kind = (
            self.format.spec(),
            self.usage.value,
            tuple(self.shape),
            self.dtype,
            self.requires_grad,
            isinstance(self, torch.nn.Parameter),
        )
        # A part goes into a file as a tensor of its own.
        own: Any = self.detach().clone() if self.shared else self
        return rebuild, (own.buffers | ends, kind)

    def __dlpack__(self, **options: Any) -> Any:
        """Refused: the values have no memory that another library could read."""
        raise UnsupportedOpError(
            f"a {self.format.name} tensor has no memory of its own to lend through DLPack; "
            f"call .dequantize() on it, or lend its buffers"
        )

    __dlpack_device__ = __dlpack__

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        if id(self) not in memo:
            copy = self.detach().clone().requires_grad_(self.requires_grad)
            memo[id(self)] = _as_parameter(copy) if isinstance(self, torch.nn.Parameter) else copy
        return memo[id(self)]

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return (
            f"QuantizedTensor(format={self.format.name}, usage={self.usage.name}, "
            f"shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"nbytes={self.nbytes})"
        )


def rebuild(buffers: dict[str, Tensor], kind: tuple[Any, ...]) -> QuantizedTensor:
    """Put a quantized tensor together from plain values; this is what unpickling calls."""
    spec, usage, shape, dtype, requires_grad, is_parameter = kind
    buffers = dict(buffers)
    ends_G = buffers.pop("ends_G", None)
    tensor = QuantizedTensor(
        buffers,
        format=from_spec(spec),
        usage=Usage(usage),
        shape=torch.Size(shape),
        dtype=dtype,
        ends_G=ends_G,
        requires_grad=requires_grad,
    )
    return _as_parameter(tensor) if is_parameter else tensor


def equal_groups(groups: int, rows: int, device: torch.device) -> Tensor:
    """Running ends of ``groups`` groups of ``rows`` rows each, made without a host copy."""
    return torch.arange(1, groups + 1, dtype=torch.int32, device=device) * rows


def _as_parameter(tensor: Tensor) -> QuantizedTensor:
    return torch.nn.Parameter(tensor, requires_grad=tensor.requires_grad)  # pyright: ignore


def _rows(shape: torch.Size) -> int:
    return math.prod(shape[:-1])


torch.serialization.add_safe_globals([rebuild])
