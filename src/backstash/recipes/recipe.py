"""A recipe says in which number format each operand of a matmul is kept.

A recipe is a frozen value.  It is asked with a *role*: which operand of which matmul, in
which pass, of which module.  Take one by name (:mod:`backstash.recipes.named`) and vary it by
keyword::

    recipe("mxfp8")
    recipe("float8_current", power_of_two=True, keep_high_precision=("*.head", "layers.0.*"))
    recipe("nvfp4", backward_override="high_precision")
    custom(lambda role: MXFP8 if role.module == "GroupedMLP" else HIGH_PRECISION)
"""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from backstash.errors import RecipeError
from backstash.formats import HIGH_PRECISION, Format
from backstash.recipes.products import Product, check_product


class Operand(enum.Enum):
    """What a matrix is to the matmul that reads it."""

    INPUT = "input"
    WEIGHT = "weight"
    #: The gradient of the output, which both backward matmuls read.
    GRADIENT = "gradient"
    #: What an activation function is given; no matmul reads it, it is only kept for backward.
    PREACTIVATION = "preactivation"


class Phase(enum.Enum):
    """Which matmul reads the operand: that of forward, or one of backward."""

    FORWARD = "forward"
    BACKWARD = "backward"


class BackwardOverride(enum.Enum):
    """What backward reads instead of what the formats say."""

    #: The values themselves: inputs are kept and gradients are multiplied as they are.
    HIGH_PRECISION = "high_precision"
    #: The values that forward read: the rows of inputs and weights, dequantized.
    DEQUANTIZED = "dequantized"


@dataclasses.dataclass(frozen=True)
class Role:
    """One operand of one matmul of one module.

    Attributes:
        operand: What the matrix is to the matmul.
        phase: The pass whose matmul reads it.
        module: Class name of the module, such as ``"Linear"``.
        name: The module's name in its model, or "" where it has none.
    """

    operand: Operand
    phase: Phase
    module: str
    name: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A format for each operand.

    Attributes:
        name: What tables and files call it.
        input, weight, gradient: Formats of the three operands.
        preactivation: How gated layers keep what backward of the activation needs.  Any
            format but ``HIGH_PRECISION`` makes that gradient approximate.
        keep_high_precision: Patterns of module names (``fnmatch``) that stay as they are.
        backward_override: What backward reads instead; a :class:`BackwardOverride` or its
            value.  Either way its matmuls are in high precision.
        decode_in_matmul: Where no matrix unit multiplies MXFP8 or NVFP4, decode them inside the
            matmul: no decoded copy of an operand reaches memory, and the matmul is slower.
        choose: Asked instead of the formats, with the role; see :func:`custom`.

    Raises:
        RecipeError: A field is not what it should be.
    """

    name: str
    input: Format = HIGH_PRECISION
    weight: Format = HIGH_PRECISION
    gradient: Format = HIGH_PRECISION
    preactivation: Format = HIGH_PRECISION
    keep_high_precision: tuple[str, ...] = ()
    backward_override: BackwardOverride | str | None = None
    decode_in_matmul: bool = False
    choose: Callable[[Role], Format] | None = None

    def __post_init__(self) -> None:
        for operand in Operand:
            _check_format(getattr(self, operand.value), f"{self.name}.{operand.value}")
        if self.preactivation.stateful:
            raise RecipeError(_NOT_LEARNT)
        patterns = self.keep_high_precision
        is_sequence = isinstance(patterns, Sequence) and not isinstance(patterns, str)
        if not is_sequence or not all(isinstance(p, str) for p in patterns):
            raise RecipeError(
                f"keep_high_precision must be a tuple of name patterns such as ('*.head',), got "
                f"{patterns!r}"
            )
        object.__setattr__(self, "keep_high_precision", tuple(patterns))
        object.__setattr__(self, "backward_override", _as_override(self.backward_override))
        if not isinstance(self.decode_in_matmul, bool):
            raise RecipeError(
                f"decode_in_matmul must be True or False, got {self.decode_in_matmul!r}"
            )
        if self.choose is None:
            self.check_products()

    def check_products(self, module: str = "", name: str = "") -> None:
        """See that there is a matmul for each two operands that meet in one.

        Raises:
            RecipeError: There is none.
        """
        for product in Product:
            if product is not Product.OUTPUT and self.backward_override is not None:
                return
            phase = Phase.FORWARD if product is Product.OUTPUT else Phase.BACKWARD
            one, other = (
                self.format(Role(Operand(operand), phase, module, name)).along(usage)
                for operand, usage in product.value
            )
            check_product(one, other, product, self.name)

    @functools.cached_property
    def fixed_formats(self) -> Mapping[Operand, Format] | None:
        """The format of each operand where it is the same in every role; None where it is not."""
        decides = (self.choose, self.backward_override, self.keep_high_precision or None)
        if decides != (None, None, None):
            return None
        return {operand: getattr(self, operand.value) for operand in Operand}

    def format(self, role: Role) -> Format:
        """The format of a role.

        Raises:
            RecipeError: The function of a custom recipe gave something else.
        """
        if role.name and any(fnmatch.fnmatchcase(role.name, p) for p in self.keep_high_precision):
            return HIGH_PRECISION
        if self.backward_override is not None and role.operand is not Operand.PREACTIVATION:
            dequantized = self.backward_override is BackwardOverride.DEQUANTIZED
            if role.phase is Phase.BACKWARD:
                if not dequantized or role.operand is Operand.GRADIENT:
                    return HIGH_PRECISION
                role = dataclasses.replace(role, phase=Phase.FORWARD)
        if self.choose is None:
            return getattr(self, role.operand.value)
        return self._chosen(self.choose, role)

    def _chosen(self, choose: Callable[[Role], Format], role: Role) -> Format:
        format = _check_format(choose(role), f"the function of recipe {self.name} for {role}")
        if not format.stateful or role.operand is Operand.GRADIENT:
            return format
        if role.operand is Operand.PREACTIVATION:
            raise RecipeError(_NOT_LEARNT)
        if any(choose(dataclasses.replace(role, phase=phase)) != format for phase in Phase):
            raise RecipeError(
                f"delayed scaling learns one scale for an operand, so the function of recipe "
                f"{self.name} must give {role} the same format in both phases"
            )
        return format


_NOT_LEARNT = (
    "preactivation cannot be kept with delayed scaling, which learns its scale from what a "
    "matmul reads; use FLOAT8_CURRENT or MXFP8"
)


def _check_format(format: Any, where: str) -> Format:
    if not isinstance(format, Format):
        raise RecipeError(
            f"{where} must be a format such as MXFP8 or HIGH_PRECISION, got {format!r}"
        )
    return format


def _as_override(given: Any) -> BackwardOverride | None:
    values = [override.value for override in BackwardOverride]
    if given is None or isinstance(given, BackwardOverride):
        return given
    if given not in values:
        raise RecipeError(f"backward_override must be None or one of {values}, got {given!r}")
    return BackwardOverride(given)
