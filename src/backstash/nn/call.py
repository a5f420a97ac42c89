"""One matmul of one call of a module: the recipe that was in force, and its operands.

A call is made in forward and goes into the plan of the autograd function, so backward
quantizes as forward did, wherever it runs.  What comes out are *operands*: a plain tensor
where the recipe keeps high precision, else a tensor quantized along the one direction that
the product reads.  How two operands are multiplied is decided in
:mod:`backstash.nn.product`, and only there are codes decoded for a product.

Letters: M rows, K columns, G groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from backstash import kernels
from backstash.formats import Float8Rowwise, Format, HighPrecisionFormat, Usage
from backstash.formats.format import amax_of
from backstash.nn.gathered import Gathered, matrix
from backstash.nn.operands import Columns, columns_of, rows_and_columns
from backstash.recipes import DelayedScaling, Gradient, Operand, Phase, Recipe, Role, Step
from backstash.tensors import GroupedTensor, QuantizedTensor

Kept = Tensor | QuantizedTensor | GroupedTensor


class CastWeight(NamedTuple):
    """A weight as forward multiplies it, and what was noted of it for backward.

    ``parts_GPK`` are the largest magnitudes of each column, part by part; None where nobody noted.
    """

    rows: Tensor
    parts_GPK: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Call:
    """The recipe of one matmul, captured in forward.

    Attributes:
        recipe: The recipe in force.
        module: Class name of the module.
        name: Name of the module and of the matmul in it.
        scalings: What learns the scale of each forward operand under delayed scaling.
        scales: The scales with which forward quantizes, and backward its weight again.
        step: Where forward notes magnitudes; None where it notes none (recomputation,
            evaluation).
        gradient: Scale and notes of the output gradient under delayed scaling.
    """

    recipe: Recipe
    module: str
    name: str
    scalings: Mapping[Operand, DelayedScaling] = dataclasses.field(default_factory=dict)
    scales: Mapping[Operand, Tensor] = dataclasses.field(default_factory=dict)
    step: Step | None = None
    gradient: Gradient | None = None

    def format(self, operand: Operand, phase: Phase) -> Format:
        """The format in which ``operand`` is read in ``phase``."""
        fixed = self.recipe.fixed_formats
        if fixed is not None:
            return fixed[operand]
        return self.recipe.format(Role(operand, phase, self.module, self.name))

    def rows(self, operand: Operand, x: Tensor, ends_G: Tensor | None = None) -> Tensor:
        """``x`` as the matmul over its last dimension reads it."""
        phase = Phase.BACKWARD if operand is Operand.GRADIENT else Phase.FORWARD
        return self._read(operand, phase, x, Usage.ROWWISE, ends_G)

    def gathered_rows(
        self, operand: Operand, x: Tensor, source_R: Tensor, ends_G: Tensor
    ) -> Tensor | Gathered:
        """:meth:`rows` of ``x[source_R]``; a row that goes to many places is quantized once."""
        phase = Phase.BACKWARD if operand is Operand.GRADIENT else Phase.FORWARD
        format = self.format(operand, phase)
        if _is_plain(format):
            return Gathered(x, source_R)
        if not format.along(Usage.ROWWISE).has_lone_rows:
            return self.rows(operand, kernels.permute(x, source_R), ends_G)
        return Gathered(self._quantize(operand, format, x, Usage.ROWWISE, None), source_R)

    def noted_weight(self, full_GNK: Tensor) -> CastWeight | None:
        """The rows of G weights, whose columns' largest magnitudes are noted on the way.

        None where backward does not ask for these.
        """
        format = self.format(Operand.WEIGHT, Phase.FORWARD)
        backward = self.format(Operand.WEIGHT, Phase.BACKWARD).along(Usage.COLUMNWISE)
        if not isinstance(format, Float8Rowwise) or not isinstance(backward, Float8Rowwise):
            return None
        if full_GNK.ndim != 3 or self._column_usage is not Usage.COLUMNWISE:
            return None
        codes, scale_inv, parts_GPK = kernels.quantize_float8_weight_rows(
            full_GNK.detach(),
            format.code.dtype,
            epsilon=format.epsilon,
            power_of_two=format.power_of_two,
        )
        rows = QuantizedTensor(
            {"row_codes": codes, "row_scale_inv": scale_inv},
            format=format,
            usage=Usage.ROWWISE,
            shape=full_GNK.shape,
            dtype=full_GNK.dtype,
        )
        return CastWeight(rows, parts_GPK)

    def columns(
        self, operand: Operand, x: Tensor | Columns, ends_G: Tensor | None = None
    ) -> Tensor | Columns:
        """``x`` as the matmul over its rows reads it, which may be to quantize it itself."""
        if isinstance(x, Columns):
            return x
        usage = self._column_usage
        if usage is Usage.COLUMNWISE and not isinstance(x, QuantizedTensor):
            format = self.format(operand, Phase.BACKWARD).along(usage)
            if (columns := columns_of(format, x, ends_G)) is not None:
                return columns
        return self._read(operand, Phase.BACKWARD, x, usage, ends_G)

    def gathered_columns(
        self, operand: Operand, x: Tensor, source_R: Tensor, ends_G: Tensor
    ) -> Tensor | Columns | Gathered:
        """:meth:`columns` of ``x[source_R]``."""
        if _is_plain(self.format(operand, Phase.BACKWARD)):
            return Gathered(x, source_R)
        if self._column_usage is Usage.COLUMNWISE:
            format = self.format(operand, Phase.BACKWARD).along(Usage.COLUMNWISE)
            if (columns := columns_of(format, x, ends_G, source_R)) is not None:
                return columns
        return self.columns(operand, kernels.permute(x, source_R), ends_G)

    def keep_columns(self, operand: Operand, x: Tensor, ends_G: Tensor | None = None) -> Kept:
        """What to save of ``x`` for the matmul over its rows; read with :meth:`kept_operand`."""
        return self._keep(operand, x, self._column_usage, ends_G)

    def keep_preactivation(self, h: Tensor, ends_G: Tensor | None = None) -> Kept:
        """What to save of an activation's input; read with :meth:`kept_values`."""
        return self._keep(Operand.PREACTIVATION, h, Usage.ROWWISE, ends_G)

    def kept_operand(self, kept: Kept) -> Tensor:
        """What :meth:`keep_columns` or :meth:`input_pair` kept, as the matmul reads it."""
        return kept.data if isinstance(kept, GroupedTensor) else kept

    def kept_values(self, kept: Kept) -> Tensor:
        """The values that :meth:`keep_preactivation` or the like kept."""
        data = self.kept_operand(kept)
        return data.dequantize() if isinstance(data, QuantizedTensor) else data

    def input_pair(
        self, x: Tensor, ends_G: Tensor | None = None, *, keep: bool
    ) -> tuple[Tensor, Kept | None]:
        """The input for forward and, if asked, what to keep: one pass over ``x``."""
        format = self.format(Operand.INPUT, Phase.FORWARD)
        if not keep or _is_plain(format) or format != self.format(Operand.INPUT, Phase.BACKWARD):
            rows = self.rows(Operand.INPUT, x, ends_G)
            return rows, self.keep_columns(Operand.INPUT, x, ends_G) if keep else None
        if self._column_usage is Usage.ROWWISE:
            read = self._quantize(Operand.INPUT, format, x, Usage.ROWWISE, ends_G)
            return read, _grouped(read, ends_G)
        both = self._quantize(Operand.INPUT, format, x, Usage.BOTH, ends_G)
        return both.only(Usage.ROWWISE), _grouped(both.only(Usage.COLUMNWISE), ends_G)

    def gradient_pair(
        self, dy: Tensor | Gathered, ends_G: Tensor | None = None, *, turned: bool = False
    ) -> tuple[Tensor | Gathered, Tensor | Columns | Gathered]:
        """The output gradient for both backward matmuls: one pass over ``dy``.

        With ``turned`` the columns are already as a float8 unit reads them.
        """
        format = self.format(Operand.GRADIENT, Phase.BACKWARD)
        if _is_plain(format):
            return dy, dy
        if turned and isinstance(format, Float8Rowwise) and ends_G is not None:
            if isinstance(dy, Gathered):
                given = Operand.GRADIENT, dy.values_TH, dy.source_R, ends_G
                return self.gathered_rows(*given), self.gathered_columns(*given)
            return rows_and_columns(format, dy, ends_G)
        dy = matrix(dy)
        both = self._quantize(Operand.GRADIENT, format, dy, Usage.BOTH, ends_G)
        return both.only(Usage.ROWWISE), both.only(Usage.COLUMNWISE)

    @property
    def _column_usage(self) -> Usage:
        """Which codes backward reads: its own, or under an override those that forward read."""
        return Usage.COLUMNWISE if self.recipe.backward_override is None else Usage.ROWWISE

    def _read(
        self, operand: Operand, phase: Phase, x: Tensor, usage: Usage, ends_G: Tensor | None
    ) -> Tensor:
        if isinstance(x, QuantizedTensor):
            return x.only(usage)
        format = self.format(operand, phase)
        if _is_plain(format):
            return x
        return self._quantize(operand, format, x, usage, ends_G)

    def _keep(self, operand: Operand, x: Tensor, usage: Usage, ends_G: Tensor | None) -> Kept:
        format = self.format(operand, Phase.BACKWARD)
        if not _is_plain(format):
            x = self._quantize(operand, format, x, usage, ends_G)
        return _grouped(x, ends_G)

    def _quantize(
        self, operand: Operand, format: Format, x: Tensor, usage: Usage, ends_G: Tensor | None
    ) -> QuantizedTensor:
        scale = self._learnt_scale(operand, x, ends_G) if format.stateful else None
        return QuantizedTensor.quantize(x, format=format, usage=usage, ends_G=ends_G, scale=scale)

    def _learnt_scale(self, operand: Operand, x: Tensor, ends_G: Tensor | None) -> Tensor:
        """The scale that earlier steps left; what this one will leave is noted."""
        if operand is Operand.GRADIENT and self.gradient is not None:
            scale = self.gradient.scale_G()
            if self.gradient.is_noting:
                self.gradient.note(amax_of(x, ends_G))
            return scale
        if self.step is not None and self.step.is_noting_forward:
            self.step.note_forward(self.scalings[operand], amax_of(x, ends_G))
        return self.scales[operand]


def _is_plain(format: Format) -> bool:
    return isinstance(format, HighPrecisionFormat)


def _grouped(x: Tensor, ends_G: Tensor | None) -> Kept:
    """With its groups, so that whoever keeps the buffer knows how much of it is real."""
    if ends_G is None:
        return x
    return GroupedTensor.from_parts(x, ends_G)
