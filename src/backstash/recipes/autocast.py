"""Which recipe is in force: ``with autocast(recipe=...)`` around the forward.

The recipe is captured with each call of a module, so backward, and the recomputation of a
checkpointed region, use the one that was in force in forward, wherever they run.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses

import torch

from backstash.errors import ConfigError, RecipeError
from backstash.recipes.named import recipe
from backstash.recipes.recipe import Recipe
from backstash.recipes.scaling import Step

HIGH_PRECISION_RECIPE = recipe("high_precision")


@dataclasses.dataclass(frozen=True)
class InForce:
    """A recipe, and the step that its calls belong to (None outside of autocast)."""

    recipe: Recipe
    step: Step | None
    entered: autocast | None = None


_NOTHING = InForce(HIGH_PRECISION_RECIPE, None)
# What was entered, outermost first.  A thread and an asynchronous task have their own, also
# where they share one autocast object.
_IN_FORCE: contextvars.ContextVar[tuple[InForce, ...]] = contextvars.ContextVar(
    "backstash_recipe",
    default=(_NOTHING,),
)
_WEIGHTS: contextvars.ContextVar[tuple[quantized_model_init, ...]] = contextvars.ContextVar(
    "backstash_weights", default=()
)


def in_force() -> InForce:
    """The recipe in force here, and its step."""
    return _IN_FORCE.get()[-1]


def current_recipe() -> Recipe:
    """The recipe in force here; high precision outside of any ``autocast``."""
    return _IN_FORCE.get()[-1].recipe


class autocast(contextlib.ContextDecorator):
    """Run the modules inside in low precision, as ``recipe`` says.

    Nests, and the inner one wins; ``enabled=False`` means high precision.  Only forward needs
    to be inside.  Leaving the outermost with gradients enabled ends a step of delayed
    scaling; leaving it by an exception ends nothing.  It also decorates a function, such as a
    ``forward``, of which each call is then inside.

    Args:
        enabled: False to keep high precision.
        recipe: A recipe or its name; default ``"mxfp8"``.

    Raises:
        RecipeError: ``recipe`` is neither a recipe nor the name of one.
        ConfigError: ``enabled`` is neither True nor False.
    """

    def __init__(self, enabled: bool = True, recipe: Recipe | str | None = None) -> None:
        if not isinstance(enabled, bool):
            # A recipe in its place would be a yes, to another recipe.
            raise ConfigError(
                f"enabled must be True or False, got {enabled!r}; pass a recipe by name: "
                f"autocast(recipe=...)"
            )
        chosen = as_recipe("mxfp8" if recipe is None else recipe)
        self.recipe = chosen if enabled else HIGH_PRECISION_RECIPE

    def __enter__(self) -> autocast:
        entries = _IN_FORCE.get()
        step = entries[-1].step or Step()
        _IN_FORCE.set((*entries, InForce(self.recipe, step, self)))
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        entries = _IN_FORCE.get()
        last = _last_index([entry.entered is self for entry in entries], "autocast")
        _IN_FORCE.set(entries[:last] + entries[last + 1 :])
        step = entries[last].step
        if step is None or step is entries[last - 1].step:
            return
        if kind is None:
            step.leave(learns=torch.is_grad_enabled())
        else:
            step.abandon()


class quantized_model_init:
    """Create the weights of modules inside in the low precision of a recipe's weights.

    They are initialized in high precision and quantized once.

    Raises:
        RecipeError: ``recipe`` is neither a recipe nor the name of one.
    """

    def __init__(self, recipe: Recipe | str) -> None:
        self.recipe = as_recipe(recipe)

    def __enter__(self) -> quantized_model_init:
        _WEIGHTS.set((*_WEIGHTS.get(), self))
        return self

    def __exit__(self, *exception: object) -> None:
        entries = _WEIGHTS.get()
        last = _last_index([entry is self for entry in entries], "quantized_model_init")
        _WEIGHTS.set(entries[:last] + entries[last + 1 :])


def _last_index(is_mine: list[bool], what: str) -> int:
    if not any(is_mine):
        raise ConfigError(
            f"{what} was left where it had not been entered; enter and leave it in the same "
            f"thread or task"
        )
    return len(is_mine) - 1 - is_mine[::-1].index(True)


def weight_recipe() -> Recipe | None:
    """The recipe in which new weights are created, or None."""
    entries = _WEIGHTS.get()
    return entries[-1].recipe if entries else None


def as_recipe(given: Recipe | str) -> Recipe:
    """A recipe from itself or from its name.

    Raises:
        RecipeError: It is neither.
    """
    if isinstance(given, str):
        if given not in _BY_NAME:
            _BY_NAME[given] = recipe(given)
        return _BY_NAME[given]
    if not isinstance(given, Recipe):
        raise RecipeError(
            f"recipe must be a Recipe or a name such as 'mxfp8', got {given!r}; make one with "
            f"backstash.recipe(name) or backstash.custom(function)"
        )
    return given


# Entered at every step of a training loop, and a recipe never changes.  Torch's compiler warns
# about the caches of functools.
_BY_NAME: dict[str, Recipe] = {}
