"""The codes of an operand, laid out as what multiplies them takes them.

Formats keep their codes in the matrix's own order, whichever direction their scales follow,
because that is what can be saved, paged and moved.  A float8 matrix unit wants what it adds up
over last in memory: rows lie so already, columns are turned here, just before the product.
Columns of groups that nobody saves are not quantized before either (:class:`Columns`): then
one pass quantizes and turns them.

Letters: T rows, K input features, N output features, G groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from backstash import kernels
from backstash.errors import LayoutError
from backstash.formats import (
    Float8Block,
    Float8Current,
    Float8Delayed,
    Float8Rowwise,
    Format,
    MXFP8Format,
    NVFP4Format,
    Usage,
)
from backstash.kernels import FLOAT8_UNIT, Blocks, Codes, Scaled, Turned
from backstash.tensors import QuantizedTensor

#: Formats whose scales leave the sum of a product, and formats whose scales are inside it.
SCALED_FORMATS = (Float8Current, Float8Delayed, Float8Rowwise)
BLOCK_FORMATS = (Float8Block, MXFP8Format, NVFP4Format)


@dataclasses.dataclass(frozen=True, eq=False)
class Columns:
    """Columns of a matrix in groups that the product which reads them quantizes.

    Attributes:
        values: The plain matrix, rows of all groups one after another; None where only what is
            ``ready`` was made.
        format: With a scale for each column of each group.
        ends_G: The ends of the groups.
        shape: What the matrix is to the product: ``(T, K)``, or ``(G, N, K)`` of a weight.
        source_T: Which row of ``values`` each row of the matrix is; None if it is its own.
        ready: The turned columns, where they were made together with the rows.
        amax_GK: Of a weight, the largest magnitude of each column, if forward has noted them.
    """

    values: Tensor | None
    format: Float8Rowwise
    ends_G: Tensor
    shape: torch.Size
    source_T: Tensor | None = None
    ready: Turned | None = None
    amax_GK: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.ends_G.device

    def view(self, shape: torch.Size) -> Columns:
        return dataclasses.replace(self, shape=shape)

    def quantized(self) -> Tensor:
        """The columns in the matrix's own order, for a product that decodes them."""
        x = self.values
        if x is None:
            return self._turned_back()
        return QuantizedTensor.quantize(
            x if self.source_T is None else kernels.permute(x, self.source_T),
            format=self.format,
            usage=Usage.COLUMNWISE,
            ends_G=self.ends_G,
            scale=None,
        ).view(self.shape)

    def turned(self) -> Turned:
        """The columns as rows, each group in whole units."""
        if self.ready is not None:
            return self.ready
        if self.values is None:
            raise LayoutError("columns need values, or to be ready; give Columns one of the two")
        return kernels.quantize_float8_turned(
            self.values,
            self.format.code.dtype,
            self.ends_G,
            self.source_T,
            epsilon=self.format.epsilon,
            power_of_two=self.format.power_of_two,
        )

    def of_weight(self) -> Scaled:
        """The columns of a weight as rows: ``(G, K, N)``."""
        if self.values is None or self.ready is not None:
            # All groups have N rows, a multiple of the unit: nothing is padded between them.
            G, N, _ = self.shape
            codes, scale_inv, _ = self.turned()
            return Scaled(codes[:, : G * N].unflatten(1, (G, N)).transpose(0, 1), scale_inv)
        codes, scale_inv = kernels.quantize_float8_weight(
            self.values.view(self.shape),
            self.format.code.dtype,
            self.amax_GK,
            epsilon=self.format.epsilon,
            power_of_two=self.format.power_of_two,
        )
        return Scaled(codes, scale_inv)

    def _turned_back(self) -> Tensor:
        """What is ready in the matrix's own order: of nothing else are there any codes."""
        turned_KP, scale_inv, padded_G = self.turned()
        rows = self.shape[:-1].numel()
        ends_G = self.ends_G.long().clamp(max=rows)
        row_T = torch.arange(rows, device=self.device)
        group_T = torch.searchsorted(ends_G, row_T, right=True).clamp(max=len(ends_G) - 1)
        shift_G = F.pad(padded_G[:-1] - ends_G[:-1], (1, 0))
        column_T = (row_T + shift_G[group_T]).clamp(max=turned_KP.shape[1] - 1)
        codes_TK = turned_KP.view(torch.uint8).index_select(1, column_T).t().contiguous()
        return QuantizedTensor(
            {"column_codes": codes_TK, "column_scale_inv": scale_inv},
            format=self.format,
            usage=Usage.COLUMNWISE,
            shape=torch.Size((rows, self.shape[-1])),
            dtype=torch.float32,
            ends_G=self.ends_G,
        ).view(self.shape)


def columns_of(
    format: Format, x: Tensor, ends_G: Tensor | None, source_T: Tensor | None = None
) -> Columns | None:
    """The columns of ``x``, not quantized yet; None if they cannot wait for their product."""
    if ends_G is None or not isinstance(format, Float8Rowwise):
        return None
    rows = len(x) if source_T is None else len(source_T)
    return Columns(x, format, ends_G, torch.Size((rows, x.shape[1])), source_T)


def rows_and_columns(
    format: Float8Rowwise, x: Tensor, ends_G: Tensor
) -> tuple[QuantizedTensor, Columns]:
    """Both directions in one pass, the columns turned."""
    (codes, scale_inv), ready = kernels.quantize_float8_rows_and_turned(
        x,
        format.code.dtype,
        ends_G,
        epsilon=format.epsilon,
        power_of_two=format.power_of_two,
    )
    rows = QuantizedTensor(
        {"row_codes": codes, "row_scale_inv": scale_inv},
        format=format,
        usage=Usage.ROWWISE,
        shape=x.shape,
        dtype=x.dtype,
        ends_G=ends_G,
    )
    return rows, Columns(None, format, ends_G, x.shape, ready=ready)


def scaled(operand: Tensor | Columns, usage: Usage) -> Scaled:
    """Float8 codes in the matrix's own order, and their inverse scales as their format has them."""
    format, buffers = _parts(operand, usage)
    if not isinstance(format, SCALED_FORMATS):
        raise _no_codes("a scale for a tensor, a row or a column", format)
    prefix = _PREFIX[usage] if isinstance(format, Float8Rowwise) else ""
    codes = buffers[prefix + "codes"].view(format.code.dtype)
    return Scaled(codes.view(operand.shape), buffers[prefix + "scale_inv"])


def blocks(operand: Tensor | Columns, usage: Usage) -> Codes:
    """Codes and scales of blocks, as the matrix's own order has them."""
    format, buffers = _parts(operand, usage)
    if not isinstance(format, BLOCK_FORMATS):
        raise _no_codes("blocks", format)
    direction = Blocks.TILES if format.two_d else _DIRECTION[usage]
    prefix = "" if format.two_d else _PREFIX[usage]
    codes = buffers[prefix + "codes"]
    scales = "scale_inv" if isinstance(format, Float8Block) else "scales"
    if isinstance(format, Float8Block):
        codes = codes.view(format.code.dtype)
    elif isinstance(format, MXFP8Format):
        codes = codes.view(torch.float8_e4m3fn)
    return Codes(
        codes,
        buffers[prefix + scales],
        (operand.shape[:-1].numel(), operand.shape[-1]),
        direction,
        amax=buffers.get(prefix + "amax"),
        is_rotated=isinstance(format, NVFP4Format)
        and format.hadamard
        and direction is Blocks.COLUMNS,
    )


def turned(operand: Tensor | Columns) -> Scaled:
    """The columns of a matrix as rows, in whole units, and their inverse scales."""
    codes, scale_inv = scaled(operand, Usage.COLUMNWISE)
    turned = kernels.transpose_codes(codes)
    if missing := -turned.shape[1] % FLOAT8_UNIT:
        turned = F.pad(turned.view(torch.uint8), (0, missing)).view(codes.dtype)
    return Scaled(turned, scale_inv.view(-1, 1) if scale_inv.ndim == 2 else scale_inv)


def grouped_rows(operand: Tensor, ends_G: Tensor) -> Scaled:
    """Rows of groups, with an inverse scale for each row also where a group shares one."""
    codes, scale_inv = scaled(operand, Usage.ROWWISE)
    if scale_inv.ndim == 2:
        return Scaled(codes, scale_inv.flatten())
    group_T = kernels.row_groups(ends_G, len(codes)).clamp(max=len(ends_G) - 1)
    return Scaled(codes, scale_inv.index_select(0, group_T))


def grouped_weight(operand: Tensor | Columns, usage: Usage) -> Scaled:
    """Each group's weight with what is added up over last, and an inverse scale for each row."""
    if isinstance(operand, Columns):
        return operand.of_weight()
    codes, scale_inv = scaled(operand, usage)
    if usage is Usage.COLUMNWISE:
        codes = kernels.transpose_codes(codes)
    return Scaled(codes, _scales_of_lines(scale_inv, *codes.shape[:2]))


def turned_groups(operand: Tensor | Columns, ends_G: Tensor) -> tuple[Scaled, Tensor]:
    """The columns of groups as rows, each group in whole units, and where each ends then."""
    if isinstance(operand, Columns):
        codes, scale_inv, padded_G = operand.turned()
        return Scaled(codes, scale_inv), padded_G
    codes, scale_inv = scaled(operand, Usage.COLUMNWISE)
    turned, padded_G = kernels.transpose_groups(codes, ends_G)
    return Scaled(turned, _scales_of_lines(scale_inv, len(ends_G), len(turned))), padded_G


def _scales_of_lines(scale_inv: Tensor, groups: int, lines: int) -> Tensor:
    """``(G, lines)``, also where a group shares one scale."""
    if scale_inv.ndim == 1:
        scale_inv = scale_inv.unsqueeze(1).expand(groups, lines)
    return scale_inv.contiguous().view(groups, lines)


_PREFIX = {Usage.ROWWISE: "row_", Usage.COLUMNWISE: "column_"}
_DIRECTION = {Usage.ROWWISE: Blocks.ROWS, Usage.COLUMNWISE: Blocks.COLUMNS}


def _parts(operand: Tensor | Columns, usage: Usage) -> tuple[Format | None, Mapping[str, Tensor]]:
    """The format of one direction, and its buffers by the names that it gives them."""
    if isinstance(operand, Columns):
        operand = operand.quantized()
    if not isinstance(operand, QuantizedTensor):
        return None, {}
    buffers = operand.format.buffers_along(operand.buffers, usage)
    return operand.format.along(usage), buffers


def _no_codes(wanted: str, format: Format | None) -> LayoutError:
    came = "plain values" if format is None else format.name
    return LayoutError(f"the product reads codes with {wanted}, got {came}; multiply their values")
