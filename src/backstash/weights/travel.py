"""How one weight travels: which matrices each rank sends, and what they make together.

In high precision a rank sends its shard.  In a low-precision format it quantizes its shard
where it lives and sends the codes, and the scales of its rows and blocks, of the one direction
that the matmul ahead reads: as a rule rows for forward and columns for backward.  What arrives
is, bit for bit, the whole weight quantized:

* what all rows share, a scale of the weight or of each expert or column, comes from the
  largest magnitude over all ranks, agreed on first.  It is then known everywhere and is not
  sent;
* rows are whole on their rank, and so are blocks of rows, because cuts are between them
  (:mod:`backstash.weights.layout`).

Which of a format's buffers have rows or blocks to send is what the format itself says of
buffers with a valid length (``Format.valid_rows``).

Letters: M rows of the whole weight, K columns, G experts.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from backstash import kernels
from backstash.errors import RecipeError
from backstash.formats import (
    Float8Block,
    Float8Current,
    Float8Rowwise,
    Format,
    HighPrecisionFormat,
    MXFP8Format,
    NVFP4Format,
    Usage,
)
from backstash.tensors import QuantizedTensor
from backstash.weights.channel import Parcel
from backstash.weights.layout import Layout

_KNOWN = (HighPrecisionFormat, Float8Current, Float8Rowwise, Float8Block, MXFP8Format, NVFP4Format)


@dataclasses.dataclass(frozen=True)
class WeightKind:
    """What the whole weight is: its cut and its dtype."""

    layout: Layout
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Sent:
    """What one rank sends of a weight, by buffer, and what it need not send to know it."""

    parcels: dict[str, Parcel]
    known: dict[str, Tensor]


def as_matrix(x: Tensor, rows: int, columns: int) -> Tensor:
    """All rows one after another; ``x`` itself where it is that already."""
    return x if x.shape == (rows, columns) else x.reshape(rows, columns)


class Question(enum.Enum):
    """Largest magnitudes of a shard, of which the largest of all ranks is needed."""

    OF_ALL = "amax"  # of the weight, or of each expert
    OF_COLUMNS = "column amax"  # of each column, of each expert
    OF_ROTATED = "rotated amax"  # as above, behind the Hadamard transform
    OF_ROTATED_COLUMNS = "rotated column amax"

    def ask(self, shard: Tensor, layout: Layout, rank: int) -> Tensor:
        """What this rank knows."""
        x_MK = shard.reshape(layout.counts[rank], layout.columns)
        ends_G = layout.shard_ends(rank, shard.device)
        if self is Question.OF_ALL:
            return kernels.amax(x_MK) if ends_G is None else kernels.group_amax(x_MK, ends_G)
        if self is Question.OF_COLUMNS:
            return kernels.column_amax(x_MK, ends_G)
        amax_GK = kernels.rotated_column_amax(x_MK, kernels.hadamard_matrix(x_MK.device), ends_G)
        rotated = self is Question.OF_ROTATED
        return kernels.row_amax(amax_GK).flatten() if rotated else amax_GK


@dataclasses.dataclass(frozen=True)
class Travel:
    """A format, and the direction of it that travels.

    Raises:
        RecipeError: The format cannot be made from shards alone.
    """

    format: Format
    usage: Usage

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", self.format.along(self.usage))
        format = self.format
        if isinstance(format, _KNOWN) and not getattr(format, "stochastic_rounding", False):
            return
        reason = "it is not known here how"
        if format.stateful:
            reason = "its scale belongs to the layer"
        elif isinstance(format, _KNOWN):
            reason = "each rank would round at random in its own way"
        raise RecipeError(
            f"a weight cannot travel in {format.name}, because {reason}; gather in high "
            "precision, or in a recipe whose weights have another format"
        )

    @property
    def block(self) -> int:
        """How many rows share a scale, so that a cut must not part them."""
        format = self.format
        by_rows = self.usage is Usage.ROWWISE and not format.serves_both
        return 1 if by_rows else getattr(format, "block", 1)

    @property
    def question(self) -> Question | None:
        """What the ranks must know of each other's shards before they pack; None for nothing."""
        format = self.format
        by_rows = self.usage is Usage.ROWWISE
        if isinstance(format, Float8Current):
            return Question.OF_ALL
        if isinstance(format, Float8Rowwise):
            return None if by_rows else Question.OF_COLUMNS
        if not isinstance(format, NVFP4Format) or (format.row_scaled and by_rows):
            return None
        if format.two_d or by_rows:
            return Question.OF_ALL
        if format.hadamard:
            return Question.OF_ROTATED_COLUMNS if format.row_scaled else Question.OF_ROTATED
        return Question.OF_COLUMNS if format.row_scaled else Question.OF_ALL

    def pack(self, shard: Tensor, layout: Layout, rank: int, amax: Tensor | None) -> Sent:
        """What this rank sends; ``amax`` is the answer of all ranks to the question."""
        x_MK = as_matrix(shard, layout.counts[rank], layout.columns)
        if isinstance(self.format, HighPrecisionFormat):
            return Sent({"values": Parcel(x_MK, layout.counts)}, {})
        ends_G = layout.shard_ends(rank, shard.device)
        buffers = _encode(self, x_MK, ends_G, amax)
        parcels, known = {}, {}
        for name, buffer in buffers.items():
            counts = _counts(self.format, name, layout)
            if counts is None:
                known[name] = buffer
            else:
                parcels[name] = Parcel(buffer[: counts[rank]], counts)
        return Sent(parcels, known)

    def unpack(self, arrived: Sequence[Tensor], sent: Sent, weight: WeightKind) -> Tensor:
        """The whole weight from the whole of each parcel."""
        layout = weight.layout
        if isinstance(self.format, HighPrecisionFormat):
            return arrived[0] if arrived[0].shape == layout.shape else arrived[0].view(layout.shape)
        parts = dict(zip(sent.parcels, arrived, strict=True)) | sent.known
        specs = self.format.buffers(
            layout.rows, layout.columns, weight.dtype, self.usage, layout.groups
        )
        if isinstance(self.format, NVFP4Format) and "column_codes" in parts:
            codes = _turned(parts["column_codes"], layout, self.format.row_multiple)
            parts["column_codes"] = codes
        buffers = {name: _filled(parts[name], spec.shape) for name, spec in specs.items()}
        return QuantizedTensor(
            buffers,
            format=self.format,
            usage=self.usage,
            shape=layout.shape,
            dtype=weight.dtype,
            ends_G=layout.ends(arrived[0].device),
        )


@functools.lru_cache(maxsize=4096)
def _counts(format: Format, buffer: str, layout: Layout) -> tuple[int, ...] | None:
    """How many rows of a buffer each rank makes; None if all make the same buffer."""
    counts = []
    for rank, rows in enumerate(layout.counts):
        ends_G = layout.shard_ends(rank, torch.device("cpu"))
        ends_G = torch.tensor([rows], device="cpu") if ends_G is None else ends_G
        used = format.valid_rows(buffer, ends_G, rows)
        if used is None:
            return None
        counts.append(int(used))
    return tuple(counts)


def _encode(
    way: Travel, x_MK: Tensor, ends_G: Tensor | None, amax: Tensor | None
) -> dict[str, Tensor]:
    """A shard as the format encodes the whole, with the magnitudes of all ranks."""
    format, usage = way.format, way.usage
    if isinstance(format, Float8Current) and amax is not None:
        return _encode_float8(format, x_MK, ends_G, amax)
    if isinstance(format, Float8Rowwise) and amax is not None:
        return _with_witnesses(format, x_MK, usage, ends_G, amax)
    if isinstance(format, NVFP4Format) and amax is not None:
        return _encode_nvfp4(format, x_MK, usage, ends_G, amax)
    if len(x_MK):
        return format.encode(x_MK, usage, ends_G, None)
    groups = None if ends_G is None else len(ends_G)
    specs = format.buffers(0, x_MK.shape[1], x_MK.dtype, usage, groups)
    return {
        name: torch.empty(spec.shape, dtype=spec.dtype, device=x_MK.device)
        for name, spec in specs.items()
    }


def _with_witnesses(
    format: Format, x_MK: Tensor, usage: Usage, ends_G: Tensor | None, amax_GK: Tensor
) -> dict[str, Tensor]:
    """Encode with one more row in each group, which holds the magnitudes of all ranks.

    The scale is then that of the whole weight, by the format's own arithmetic.  A magnitude
    is that of some value of the weight, so it is exact in the weight's dtype.
    """
    groups, rows = len(amax_GK), len(x_MK)
    ends = torch.tensor([rows], device=x_MK.device) if ends_G is None else ends_G.long()
    place_M = torch.arange(rows, device=x_MK.device)
    place_M = place_M + torch.searchsorted(ends, place_M, right=True)
    witness_G = ends + torch.arange(groups, device=x_MK.device)
    seen_MK = x_MK.new_empty(rows + groups, x_MK.shape[1])
    seen_MK[place_M] = x_MK
    seen_MK[witness_G] = amax_GK.to(x_MK.dtype)
    ends_seen = None if ends_G is None else (witness_G + 1).int()
    buffers = format.encode(seen_MK, usage, ends_seen, None)
    return {
        name: buffer[place_M] if len(buffer) == rows + groups and "codes" in name else buffer
        for name, buffer in buffers.items()
    }


def _encode_float8(
    format: Float8Current, x_MK: Tensor, ends_G: Tensor | None, amax: Tensor
) -> dict[str, Tensor]:
    options = {"power_of_two": format.power_of_two, "epsilon": format.epsilon}
    scale = kernels.scale_from_amax(amax, largest=format.code.largest, **options)
    codes = kernels.quantize_scaled(x_MK, scale, format.code.dtype, ends_G)
    return {"codes": codes, "scale_inv": torch.ones_like(scale) / scale}


def _encode_nvfp4(
    format: NVFP4Format, x_MK: Tensor, usage: Usage, ends_G: Tensor | None, amax: Tensor
) -> dict[str, Tensor]:
    options: dict[str, Any] = {"four_over_six": format.four_over_six}
    if format.two_d:
        codes, scales = kernels.quantize_nvfp4_tiles(x_MK, amax, ends_G, **options)
        return {"codes": codes, "scales": scales, "amax": amax}
    if usage is Usage.ROWWISE:
        codes, scales = kernels.quantize_nvfp4_rows(x_MK, amax, ends_G, **options)
        return {"row_codes": codes, "row_scales": scales, "row_amax": amax}
    rotation = kernels.hadamard_matrix(x_MK.device) if format.hadamard else None
    codes, scales = kernels.quantize_nvfp4_columns(x_MK, amax, ends_G, rotation, **options)
    codes = codes.view(-1, x_MK.shape[1])
    return {"column_codes": codes, "column_scales": scales, "column_amax": amax}


def _turned(codes_WK: Tensor, layout: Layout, multiple: int) -> Tensor:
    """Transposed codes of each rank's rows, as the transposed codes of all rows of each expert."""
    groups, rows_of_group = layout.groups or 1, layout.shape[-2]
    flat, K, position = codes_WK.flatten(), layout.columns, 0
    pieces: list[list[Tensor]] = [[] for _ in range(groups)]
    for start, count in zip(layout.cuts, layout.counts, strict=False):
        for g, of_group in enumerate(pieces):
            first, last = g * rows_of_group, (g + 1) * rows_of_group
            inside = max(0, min(start + count, last) - max(start, first))
            width = -(-inside // multiple) * multiple // 2
            of_group.append(flat[position : position + width * K].view(K, width))
            position += width * K
    return torch.cat([torch.cat(of_group, dim=1).flatten() for of_group in pieces]).view(-1, K)


def _filled(part: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A buffer of the format's size: behind the blocks that are used it has zeros."""
    if part.shape == shape:
        return part
    whole = part.new_zeros(shape)
    whole[: len(part)] = part
    return whole
