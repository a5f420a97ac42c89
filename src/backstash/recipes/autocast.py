"""Which recipe is in force: ``with autocast(recipe=...)`` around the forward.

The recipe is captured with each call of a module, so backward, and the recomputation of a
checkpointed region, use the one that was in force in forward, wherever they run.
"""

from __future__ import annotations

import contextvars
import dataclasses

import torch

from backstash.errors import RecipeError
from backstash.recipes.recipe import Recipe, recipe
from backstash.recipes.scaling import Step

HIGH_PRECISION_RECIPE = recipe("high_precision")


@dataclasses.dataclass(frozen=True)
class InForce:
    """A recipe, and the step that its calls belong to (None outside of autocast)."""

    recipe: Recipe
    step: Step | None


_IN_FORCE: contextvars.ContextVar[InForce] = contextvars.ContextVar(
    "backstash_recipe", default=InForce(HIGH_PRECISION_RECIPE, None)
)
_WEIGHTS: contextvars.ContextVar[Recipe | None] = contextvars.ContextVar(
    "backstash_weights", default=None
)


def in_force() -> InForce:
    """The recipe in force here, and its step."""
    return _IN_FORCE.get()


def current_recipe() -> Recipe:
    """The recipe in force here; high precision outside of any ``autocast``."""
    return _IN_FORCE.get().recipe


class autocast:
    """Run the modules inside in low precision, as ``recipe`` says.

    Nests, and the inner one wins; ``enabled=False`` means high precision.  Only forward needs
    to be inside.  Leaving the outermost with gradients enabled ends a step of delayed
    scaling; leaving it by an exception ends nothing.

    Args:
        enabled: False to keep high precision.
        recipe: A recipe or its name; default ``"mxfp8"``.

    Raises:
        RecipeError: ``recipe`` is neither a recipe nor the name of one.
    """

    def __init__(self, enabled: bool = True, recipe: Recipe | str | None = None) -> None:
        chosen = as_recipe("mxfp8" if recipe is None else recipe)
        self.recipe = chosen if enabled else HIGH_PRECISION_RECIPE
        self._entered: list[tuple[contextvars.Token[InForce], Step | None]] = []

    def __enter__(self) -> autocast:
        outer = _IN_FORCE.get().step
        step = Step() if outer is None else outer
        token = _IN_FORCE.set(InForce(self.recipe, step))
        self._entered.append((token, step if outer is None else None))
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        token, own_step = self._entered.pop()
        _IN_FORCE.reset(token)
        if own_step is not None and kind is None and torch.is_grad_enabled():
            own_step.end_forward()


class quantized_model_init:
    """Create the weights of modules inside in the low precision of a recipe's weights.

    They are initialized in high precision and quantized once.

    Raises:
        RecipeError: ``recipe`` is neither a recipe nor the name of one.
    """

    def __init__(self, recipe: Recipe | str) -> None:
        self.recipe = as_recipe(recipe)
        self._tokens: list[contextvars.Token[Recipe | None]] = []

    def __enter__(self) -> quantized_model_init:
        self._tokens.append(_WEIGHTS.set(self.recipe))
        return self

    def __exit__(self, *exception: object) -> None:
        _WEIGHTS.reset(self._tokens.pop())


def weight_recipe() -> Recipe | None:
    """The recipe in which new weights are created, or None."""
    return _WEIGHTS.get()


def as_recipe(given: Recipe | str) -> Recipe:
    """A recipe from itself or from its name.

    Raises:
        RecipeError: It is neither.
    """
    if isinstance(given, str):
        return recipe(given)
    if not isinstance(given, Recipe):
        raise RecipeError(
            f"recipe must be a Recipe or a name such as 'mxfp8', got {given!r}; make one with "
            f"backstash.recipe(name) or backstash.custom(function)"
        )
    return given
