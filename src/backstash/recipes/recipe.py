"""A recipe says in which number format each operand of a matmul is kept.

A recipe is a frozen value.  It is asked with a *role*: which operand of which matmul, in
which pass, of which module.  Take one by name and vary it by keyword::

    recipe("mxfp8")
    recipe("float8_current", power_of_two=True, keep_high_precision=("*.head", "layers.0.*"))
    custom(lambda role: MXFP8 if role.module == "GroupedMLP" else HIGH_PRECISION)
"""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from backstash.errors import RecipeError
from backstash.formats import (
    FLOAT8_CURRENT,
    FLOAT8_DELAYED,
    HIGH_PRECISION,
    MXFP8,
    Code,
    Format,
)


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

    def format(self, role: Role) -> Format:
        """The format of a role.

        Raises:
            RecipeError: The function of a custom recipe gave something else.
        """
        if role.name and any(fnmatch.fnmatchcase(role.name, p) for p in self.keep_high_precision):
            return HIGH_PRECISION
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


def _high_precision(**common: Any) -> Recipe:
    return Recipe(name="high_precision", **common)


def _float8_current(*, power_of_two: bool = False, epsilon: float = 0.0, **common: Any) -> Recipe:
    """``scale = largest / amax(x)``; ``q = cast(x * scale)``; ``x' = q / scale``."""
    forward = dataclasses.replace(FLOAT8_CURRENT, power_of_two=power_of_two, epsilon=epsilon)
    backward = dataclasses.replace(forward, code=Code.E5M2)
    formats: dict[str, Any] = {"input": forward, "weight": forward, "gradient": backward}
    return Recipe(name="float8_current", **(formats | common))


def _float8_delayed(
    *, history: int = 1024, margin: int = 0, most_recent: bool = False, **common: Any
) -> Recipe:
    """``scale = largest / 2^margin / max(amaxes of earlier steps)``; then as current scaling."""
    forward = dataclasses.replace(
        FLOAT8_DELAYED, history=history, margin=margin, most_recent=most_recent
    )
    backward = dataclasses.replace(forward, code=Code.E5M2)
    formats: dict[str, Any] = {"input": forward, "weight": forward, "gradient": backward}
    return Recipe(name="float8_delayed", **(formats | common))


def _mxfp8(**common: Any) -> Recipe:
    """``e = ceil(log2(amax(block) / 448))``; ``q = cast(x / 2^e)``; ``x' = q * 2^e``."""
    formats: dict[str, Any] = {"input": MXFP8, "weight": MXFP8, "gradient": MXFP8}
    return Recipe(name="mxfp8", **(formats | common))


_BY_NAME: dict[str, Callable[..., Recipe]] = {
    "high_precision": _high_precision,
    "float8_current": _float8_current,
    "float8_delayed": _float8_delayed,
    "mxfp8": _mxfp8,
}


def recipe_names() -> tuple[str, ...]:
    """The names that :func:`recipe` knows."""
    return tuple(_BY_NAME)


def recipe(name: str, **options: Any) -> Recipe:
    """A recipe by name.

    Args:
        name: One of :func:`recipe_names`.
        options: Fields of :class:`Recipe` but its name, and what the format itself can vary:
            ``power_of_two`` and ``epsilon`` for ``float8_current``; ``history``, ``margin``
            and ``most_recent`` for ``float8_delayed``.

    Raises:
        RecipeError: The name or an option is unknown, or a value is not possible.
    """
    make = _BY_NAME.get(name) if isinstance(name, str) else None
    if make is None:
        raise RecipeError(f"recipe must be one of {list(_BY_NAME)}, got {name!r}")
    own = [p.name for p in inspect.signature(make).parameters.values() if p.kind is p.KEYWORD_ONLY]
    known = own + [f.name for f in dataclasses.fields(Recipe) if f.name not in ("name", "choose")]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise RecipeError(f"recipe {name!r} has the options {known}, got unknown {unknown}")
    _check_options(options)
    return make(**options)


def _check_options(options: dict[str, Any]) -> None:
    wanted = {
        "power_of_two": (bool, lambda value: True, "True or False"),
        "most_recent": (bool, lambda value: True, "True or False"),
        "epsilon": ((int, float), lambda value: 0 <= value < float("inf"), "zero or more"),
        "history": (int, lambda value: value >= 1, "a whole number of steps, at least 1"),
        "margin": (int, lambda value: abs(value) <= 64, "a whole number of powers of two, to 64"),
    }
    for key, (kind, holds, words) in wanted.items():
        if key not in options:
            continue
        value = options[key]
        # To Python, True is a whole number too.
        is_kind = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not (is_kind and holds(value)):
            raise RecipeError(f"{key} must be {words}, got {value!r}")


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
    if set(options) - {"keep_high_precision"}:
        raise RecipeError(f"custom has the option keep_high_precision, got {sorted(options)}")
    return Recipe(name=name, choose=function, **options)
