"""``GroupedTensor``: rows of many groups, one after another, in one buffer.

The running ends of the groups live on the device, so nothing on the host depends on how
many rows a group has.  The buffer may have room for more rows than there are: rows past the
last end are *not there*, whatever bytes lie in them, and no kernel reads them.

Letters: T rows of the buffer (its capacity), K columns, G groups.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from backstash.errors import DeviceError, DtypeError, LayoutError, ShapeError
from backstash.tensors.quantized import QuantizedTensor


@dataclasses.dataclass(frozen=True, eq=False, init=False)
class GroupedTensor:
    """``data`` ``(T, K)`` whose group g is the rows between ``ends_G[g-1]`` and ``ends_G[g]``.

    Attributes:
        data: A plain or quantized tensor.
        ends_G: int32, cumulative, on the device of ``data``; never past the capacity.
        overflow: Bool ``(1,)`` on the device: were more rows asked for than fit?
    """

    data: Tensor
    ends_G: Tensor
    overflow: Tensor

    def __init__(
        self, data: Tensor, ends: Tensor | Sequence[int], capacity: int | None = None
    ) -> None:
        """Describe the groups of ``data``.

        Args:
            data: ``(T, K)``.
            ends: Running ends, integers of any width on any device, or a list.
            capacity: The number of rows that ``data`` has room for; it must be T.

        Raises:
            ShapeError: ``data`` is not a matrix, ``capacity`` is not its rows, or a list of
                ends is empty, decreasing or negative.
            DtypeError: ``ends`` are not integers.
            LayoutError: ``data`` was quantized without its groups.
        """
        if not isinstance(data, Tensor) or data.ndim != 2:
            came = tuple(data.shape) if isinstance(data, Tensor) else type(data).__name__
            raise ShapeError(f"a GroupedTensor needs data of shape (T, K), got {came}; reshape it")
        if capacity is not None and capacity != len(data):
            raise ShapeError(
                f"capacity is the number of rows of data, {len(data)}, got {capacity}; give the "
                f"whole buffer, or leave capacity out"
            )
        if isinstance(data, QuantizedTensor) and data.ends_G is None:
            raise LayoutError(
                "data was quantized as one matrix, so its blocks and scales do not follow the "
                "groups; quantize the GroupedTensor of the plain values instead"
            )
        ends_G = as_ends(ends, data.device)
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "overflow", ends_G[-1:] > len(data))
        object.__setattr__(self, "ends_G", ends_G.clamp(max=len(data)).int())

    @classmethod
    def from_counts(cls, data: Tensor, counts: Tensor | Sequence[int]) -> GroupedTensor:
        """Describe the groups of ``data`` by how many rows each has.

        Raises:
            ShapeError: As the constructor, or a count on the host is negative.
            DtypeError: ``counts`` are not integers.
        """
        return cls(data, counts_to_ends(counts, data.device))

    @classmethod
    def from_parts(
        cls, data: Tensor, ends_G: Tensor, overflow: Tensor | None = None
    ) -> GroupedTensor:
        """The same value from its fields, unchecked: they were checked when it was made.

        Without ``overflow`` the ends say it: whoever cut them off at the capacity did so before.
        """
        self = object.__new__(cls)
        # Not by its dict: torch's compiler does not trace that.
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "ends_G", ends_G)
        if overflow is not None:
            object.__setattr__(self, "overflow", overflow)
        return self

    def __getattr__(self, name: str) -> Tensor:
        # Called for what is not there: layers keep many of these, and nobody asks the flag of one.
        if name != "overflow":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self.ends_G[-1:] > self.data.shape[0]

    @property
    def noted_overflow(self) -> Tensor | None:
        """``overflow`` where it was noted when the groups were made; None where ends tell it."""
        return self.__dict__.get("overflow")

    @property
    def capacity(self) -> int:
        """Rows that the buffer has room for."""
        return len(self.data)

    @property
    def num_groups(self) -> int:
        """G, the number of groups."""
        return self.ends_G.numel()

    @property
    def shape(self) -> torch.Size:
        """Shape of the buffer, ``(T, K)``."""
        return self.data.shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        """Device of the buffer and of the ends."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer at its full capacity."""
        return self.data.nbytes

    @property
    def counts_G(self) -> Tensor:
        """Rows of each group, int32, on the device."""
        return self.ends_G.diff(prepend=self.ends_G.new_zeros(1))

    def valid_bytes(self) -> dict[str, Tensor]:
        """How many bytes of each buffer are real: int64 ``(1,)`` on the device, by buffer.

        Real bytes are a prefix of their buffer, also where a format transposes each group; the
        rest is never read.  The buffer of plain values is called ``"data"``.
        """
        data = self.data
        if not isinstance(data, QuantizedTensor):
            rows = {"data": self.ends_G[-1:]}
            buffers = {"data": data}
        else:
            buffers = data.buffers
            rows = {n: data.format.valid_rows(n, self.ends_G, self.capacity) for n in buffers}
        return {name: _bytes_of(buffer, rows[name]) for name, buffer in buffers.items()}

    def members(self) -> list[Tensor]:
        """The groups as tensors of their own, which share the memory of this one.

        Each is what quantizing the group's rows alone would give.  Shapes are needed on the
        host, so on a GPU this waits for the ends.
        """
        ends = self.ends_G.tolist()
        data = self.data
        if not isinstance(data, QuantizedTensor):
            return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        format, buffers = data.format, data.buffers
        cuts = {name: self._cuts(data, name) for name in buffers}
        return [
            QuantizedTensor(
                {name: buffers[name][cuts[name][g] : cuts[name][g + 1]] for name in buffers},
                format=format,
                usage=data.usage,
                shape=torch.Size((end - start, self.shape[1])),
                dtype=data.dtype,
            )
            for g, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
        ]

    def _cuts(self, data: QuantizedTensor, buffer: str) -> list[int]:
        """Where in a buffer each group ends, after where the first begins."""
        if data.format.valid_rows(buffer, self.ends_G, self.capacity) is None:
            return list(range(self.num_groups + 1))  # a row for each group
        # What all groups up to one have is a prefix: its end is the valid length of those alone.
        firsts = (self.ends_G[: group + 1] for group in range(self.num_groups))
        valid = [data.format.valid_rows(buffer, ends_G, self.capacity) for ends_G in firsts]
        return [0, *torch.cat([rows for rows in valid if rows is not None]).tolist()]

    def dequantize(self) -> GroupedTensor:
        """The same groups with plain values."""
        if not isinstance(self.data, QuantizedTensor):
            return self
        return GroupedTensor.from_parts(self.data.dequantize(), self.ends_G, self.overflow)


def _bytes_of(buffer: Tensor, rows: Tensor | None) -> Tensor:
    """Bytes of the first ``rows`` rows of a buffer; of all of it where None are given."""
    if rows is None:
        return torch.full((1,), buffer.nbytes, dtype=torch.int64, device=buffer.device)
    return rows.long() * (buffer.shape[1:].numel() * buffer.itemsize)


def counts_to_ends(counts: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """Running ends, int64 on ``device``, of groups with ``counts`` rows.

    Raises:
        ShapeError: No counts, not one dimension, or a negative count on the host.
        DtypeError: ``counts`` are not integers.
    """
    counts_G = _integers(counts, "counts")
    if _host_sees(counts_G) and int(counts_G.min()) < 0:
        raise ShapeError(f"counts must not be negative, got {counts_G.tolist()}; clamp them")
    return _on(counts_G, device, "counts").cumsum(0)


def as_ends(ends: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """Running ends, int64 on ``device``, checked where the host can see them."""
    ends_G = _integers(ends, "ends")
    if _host_sees(ends_G) and int(ends_G.diff(prepend=ends_G.new_zeros(1)).min()) < 0:
        raise ShapeError(
            f"ends must start at zero or more and never decrease, got {ends_G.tolist()}; "
            f"use GroupedTensor.from_counts if these are the rows of each group"
        )
    return _on(ends_G, device, "ends")


def _on(values_G: Tensor, device: torch.device, what: str) -> Tensor:
    if values_G.is_meta and device.type != "meta":
        raise DeviceError(
            f"{what} must have values, on {device} or on the CPU, got a tensor on meta; give a "
            f"list or a real tensor"
        )
    return values_G.to(device, non_blocking=True)


def _host_sees(values: Tensor) -> bool:
    """May values be looked at?  On a device it would wait for it, in a trace there are none."""
    return values.is_cpu and not torch.compiler.is_compiling()


def _integers(values: Tensor | Sequence[int], what: str) -> Tensor:
    if not isinstance(values, Tensor):
        if not isinstance(values, Iterable):
            raise DtypeError(
                f"{what} must be whole numbers, an entry for each group, got {values!r}; "
                f"give a list or an integer tensor"
            )
        values = list(values)
        # To Python, True is a whole number too.
        if not all(isinstance(v, numbers.Integral) and not isinstance(v, bool) for v in values):
            raise DtypeError(f"{what} must be whole numbers, got {values}; round them")
        values = torch.tensor([int(value) for value in values], dtype=torch.int64, device="cpu")
    if values.dtype not in (torch.int32, torch.int64, torch.int16, torch.uint8, torch.int8):
        raise DtypeError(f"{what} must be integers, got {values.dtype}; use int32 or int64")
    if values.ndim != 1 or values.numel() == 0:
        raise ShapeError(
            f"{what} must have one dimension with an entry for each group, got shape "
            f"{tuple(values.shape)}; flatten it"
        )
    return values.long()


torch.serialization.add_safe_globals([GroupedTensor])
