"""Formats for which no matmul exists are refused, when a recipe is made or its layer is called."""

import dataclasses
from typing import Any

import pytest
import torch

import backstash as bs
from backstash import FLOAT8_BLOCK, FLOAT8_CURRENT, FLOAT8_ROWWISE, HIGH_PRECISION, MXFP8
from backstash.formats import Code, Hybrid
from backstash.recipes import BackwardOverride, Operand, Phase, Recipe

TILES = dataclasses.replace(FLOAT8_BLOCK, two_d=True)
COARSE = dataclasses.replace(FLOAT8_CURRENT, code=Code.E5M2)


def made(formats: Any, **options: Any) -> Recipe:
    """A recipe of formats by operand, high precision for the others."""
    return Recipe(name="mine", **dict(formats), **options)


PAIRS = [("input", "weight"), ("gradient", "weight"), ("gradient", "input")]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_tiles_by_tiles_are_refused(pair):
    with pytest.raises(bs.RecipeError, match=f"tiles.*{pair[0]} and {pair[1]}.*two_d=False"):
        made(dict.fromkeys(pair, TILES))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("other", [COARSE, dataclasses.replace(FLOAT8_ROWWISE, code=Code.E5M2)])
def test_e5m2_by_e5m2_is_refused(pair, other):
    with pytest.raises(bs.RecipeError, match=f"E5M2.*{pair[0]} and {pair[1]}.*Code.E4M3"):
        made(zip(pair, (COARSE, other), strict=True))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_tiles_by_lines_and_e5m2_by_e4m3_are_allowed(pair):
    made(zip(pair, (TILES, FLOAT8_BLOCK), strict=True))
    made(zip(pair, (COARSE, FLOAT8_CURRENT), strict=True))


def test_only_the_direction_that_a_matmul_reads_counts():
    weight = Hybrid(rows=TILES, columns=MXFP8)
    Recipe(name="mine", weight=weight, gradient=TILES)
    with pytest.raises(bs.RecipeError, match="input and weight"):
        Recipe(name="mine", weight=weight, input=TILES)


@pytest.mark.parametrize("override", list(BackwardOverride))
def test_a_backward_in_high_precision_has_no_such_matmul(override):
    recipe = Recipe(name="mine", weight=TILES, gradient=TILES, backward_override=override)
    assert recipe.weight is TILES
    with pytest.raises(bs.RecipeError, match="input and weight"):
        Recipe(name="mine", weight=TILES, input=TILES, backward_override=override)


def test_a_custom_recipe_is_refused_when_a_layer_is_called():
    recipe = bs.custom(lambda role: TILES)
    with pytest.raises(bs.RecipeError, match="recipe custom has tiles"), bs.autocast(recipe=recipe):
        bs.Linear(8, 8)(torch.ones(2, 8))


def test_a_custom_recipe_may_answer_by_phase_and_name():
    def choose(role):
        if role.name == "head" or role.operand is Operand.PREACTIVATION:
            return HIGH_PRECISION
        if role.operand is Operand.WEIGHT:
            return TILES
        return TILES if role.phase is Phase.BACKWARD and role.operand is Operand.INPUT else MXFP8

    with bs.autocast(recipe=bs.custom(choose)):
        assert bs.Linear(8, 8, name="head")(torch.ones(2, 8)).shape == (2, 8)
        assert bs.Linear(8, 8)(torch.ones(2, 8)).shape == (2, 8)


def test_what_is_kept_in_high_precision_by_name_is_not_refused():
    recipe = bs.custom(lambda role: TILES, keep_high_precision=("head",))
    with bs.autocast(recipe=recipe):
        bs.Linear(8, 8, name="head")(torch.ones(2, 8))
