"""Recipes by name, each written as its equations.

What a recipe can vary are the fields of its class here, and those of :class:`Recipe`.  In the
equations ``cast`` rounds to the nearest code and saturates, and ``x'`` is what a matmul reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from backstash.errors import RecipeError
from backstash.formats import (
    FLOAT8_BLOCK,
    FLOAT8_CURRENT,
    FLOAT8_DELAYED,
    FLOAT8_ROWWISE,
    MXFP8,
    NVFP4,
    Code,
    Format,
)
from backstash.recipes.recipe import Recipe, Role


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Named:
    """The options of a recipe; :meth:`formats` gives those of input, weight and gradient."""

    def formats(self) -> tuple[Format, ...]:
        """None: all three in high precision."""
        return ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Float8Current(_Named):
    """``scale = largest / amax(x)``; ``q = cast(x * scale)``; ``x' = q / scale``."""

    power_of_two: bool = False
    epsilon: float = 0.0
    amax_group: Any = None

    def formats(self) -> tuple[Format, ...]:
        weight = dataclasses.replace(
            FLOAT8_CURRENT, power_of_two=self.power_of_two, epsilon=self.epsilon
        )
        # Processes that share rows of one input have the same weight: nothing to ask there.
        input = dataclasses.replace(weight, amax_group=self.amax_group)
        return input, weight, dataclasses.replace(input, code=Code.E5M2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Float8Delayed(_Named):
    """``scale = largest / 2^margin / max(amaxes of earlier steps)``; then as current scaling."""

    history: int = 1024
    margin: int = 0
    most_recent: bool = False
    amax_group: Any = None

    def formats(self) -> tuple[Format, ...]:
        input = dataclasses.replace(FLOAT8_DELAYED, **vars(self))
        # As above: processes that share rows of one input have the same weight.
        weight = dataclasses.replace(input, amax_group=None)
        return input, weight, dataclasses.replace(input, code=Code.E5M2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Float8Rowwise(_Named):
    """``scale = 448 / amax(row)``; ``q = cast(x * scale)``; ``x' = q / scale``."""

    power_of_two: bool = False
    epsilon: float = 0.0

    def formats(self) -> tuple[Format, ...]:
        return (dataclasses.replace(FLOAT8_ROWWISE, **vars(self)),) * 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Float8Block(_Named):
    """``scale = 2^floor(log2(448 / amax(block)))``; ``q = cast(x * scale)``; ``x' = q / scale``.

    Blocks are 1 by 128, those of weights 128 by 128 with ``two_d``; without ``power_of_two``
    the scale is the quotient itself.
    """

    power_of_two: bool = True
    epsilon: float = 0.0
    two_d: bool = True

    def formats(self) -> tuple[Format, ...]:
        lines = dataclasses.replace(
            FLOAT8_BLOCK, power_of_two=self.power_of_two, epsilon=self.epsilon
        )
        return lines, dataclasses.replace(lines, two_d=self.two_d), lines


@dataclasses.dataclass(frozen=True, kw_only=True)
class _MXFP8(_Named):
    """``e = ceil(log2(amax(block) / 448))``; ``q = cast(x / 2^e)``; ``x' = q * 2^e``.

    Blocks are of 32, those of weights 32 by 32 with ``two_d``.
    """

    two_d: bool = False

    def formats(self) -> tuple[Format, ...]:
        return MXFP8, dataclasses.replace(MXFP8, two_d=self.two_d), MXFP8


@dataclasses.dataclass(frozen=True, kw_only=True)
class _NVFP4(_Named):
    """``S = 448 * 6 / amax(x)``; ``s = e4m3(amax(block) * S / 6)``; ``q = cast(x * S / s)``;
    ``x' = q * s / S``.

    Blocks are of 16, those of weights 16 by 16 with ``two_d``.  What the weight gradient reads
    is transformed with ``hadamard``, gradients are cast to one of two neighbours at random with
    ``stochastic_rounding``, ``row_scaled`` takes ``amax`` of each row of inputs and gradients.
    """

    two_d: bool = True
    hadamard: bool = True
    stochastic_rounding: bool = True
    four_over_six: bool = False
    row_scaled: bool = False

    def formats(self) -> tuple[Format, ...]:
        plain = dataclasses.replace(NVFP4, four_over_six=self.four_over_six)
        input = dataclasses.replace(plain, hadamard=self.hadamard, row_scaled=self.row_scaled)
        gradient = dataclasses.replace(input, stochastic_rounding=self.stochastic_rounding)
        return input, dataclasses.replace(plain, two_d=self.two_d), gradient


_BY_NAME: dict[str, type[_Named]] = {
    "high_precision": _Named,
    "float8_current": _Float8Current,
    "float8_delayed": _Float8Delayed,
    "float8_rowwise": _Float8Rowwise,
    "float8_block": _Float8Block,
    "mxfp8": _MXFP8,
    "nvfp4": _NVFP4,
}


def recipe_names() -> tuple[str, ...]:
    """The names that :func:`recipe` knows."""
    return tuple(_BY_NAME)


def recipe(name: str, **options: Any) -> Recipe:
    """A recipe by name.

    Args:
        name: One of :func:`recipe_names`.
        options: Fields of :class:`Recipe` but its name, and what the formats can vary:
            ``power_of_two`` and ``epsilon`` for ``float8_current``, ``float8_rowwise`` and
            ``float8_block``; ``amax_group`` for ``float8_current`` and ``float8_delayed``;
            ``history``, ``margin`` and ``most_recent`` for ``float8_delayed``; ``two_d`` (tiles
            for weights) for ``float8_block``, ``mxfp8`` and ``nvfp4``; ``hadamard``,
            ``stochastic_rounding``, ``four_over_six`` and ``row_scaled`` for ``nvfp4``.

    Raises:
        RecipeError: The name or an option is unknown, or a value is not possible.
    """
    make = _BY_NAME.get(name) if isinstance(name, str) else None
    if make is None:
        raise RecipeError(f"recipe must be one of {list(_BY_NAME)}, got {name!r}")
    own = [field.name for field in dataclasses.fields(make)]
    known = own + [f.name for f in dataclasses.fields(Recipe) if f.name not in ("name", "choose")]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise RecipeError(f"recipe {name!r} has the options {known}, got unknown {unknown}")
    formats = make(**{key: options.pop(key) for key in own if key in options}).formats()
    operands: dict[str, Any] = dict(zip(_OPERANDS, formats, strict=False))
    return Recipe(name=name, **(operands | options))


_OPERANDS = ("input", "weight", "gradient")


def custom(function: Callable[[Role], Format], *, name: str = "custom", **options: Any) -> Recipe:
    """A recipe that asks ``function`` for the format of each role.

    The function is asked for every call of a module, so it should be a look-up; it must give
    the same answer for the same role.

    Raises:
        RecipeError: ``function`` cannot be called, or an option is unknown.
    """
    if not callable(function):
        raise RecipeError(
            f"custom needs a function of a Role that gives a format, got {function!r}"
        )
    known = ("keep_high_precision", "backward_override", "decode_in_matmul")
    if unknown := sorted(set(options) - set(known)):
        raise RecipeError(
            f"custom has the options {list(known)}, got unknown {unknown}; the formats and their "
            f"options are what the function gives"
        )
    return Recipe(name=name, choose=function, **options)
