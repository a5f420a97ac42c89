"""Which operand is kept in which format, and which recipe is in force."""

from backstash.recipes.autocast import (
    HIGH_PRECISION_RECIPE,
    InForce,
    as_recipe,
    autocast,
    current_recipe,
    in_force,
    quantized_model_init,
    weight_recipe,
)
from backstash.recipes.named import custom, recipe, recipe_names
from backstash.recipes.recipe import BackwardOverride, Operand, Phase, Recipe, Role
from backstash.recipes.scaling import DelayedScaling, Gradient, Step

__all__ = [
    "HIGH_PRECISION_RECIPE",
    "BackwardOverride",
    "DelayedScaling",
    "Gradient",
    "InForce",
    "Operand",
    "Phase",
    "Recipe",
    "Role",
    "Step",
    "as_recipe",
    "autocast",
    "current_recipe",
    "custom",
    "in_force",
    "quantized_model_init",
    "recipe",
    "recipe_names",
    "weight_recipe",
]
