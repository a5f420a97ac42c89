"""A recipe answers every role with a format, and refuses what it cannot mean."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from typing import Any

import pytest

import backstash as bs
from backstash import (
    FLOAT8_BLOCK,
    FLOAT8_CURRENT,
    FLOAT8_DELAYED,
    FLOAT8_ROWWISE,
    HIGH_PRECISION,
    MXFP8,
    NVFP4,
)
from backstash.formats import Code
from backstash.recipes import Operand, Phase, Recipe, Role

ROLES = [
    Role(operand, phase, "Linear", name)
    for operand, phase, name in itertools.product(Operand, Phase, ["", "layers.0.fc1"])
]
INPUT = Role(Operand.INPUT, Phase.FORWARD, "Linear", "layers.0.fc1")

FORMATS_OF = {
    "high_precision": (HIGH_PRECISION, HIGH_PRECISION),
    "float8_current": (FLOAT8_CURRENT, dataclasses.replace(FLOAT8_CURRENT, code=Code.E5M2)),
    "float8_delayed": (FLOAT8_DELAYED, dataclasses.replace(FLOAT8_DELAYED, code=Code.E5M2)),
    "float8_rowwise": (FLOAT8_ROWWISE, FLOAT8_ROWWISE),
    "float8_block": (FLOAT8_BLOCK, FLOAT8_BLOCK),
    "mxfp8": (MXFP8, MXFP8),
    "nvfp4": (
        dataclasses.replace(NVFP4, hadamard=True),
        dataclasses.replace(NVFP4, hadamard=True, stochastic_rounding=True),
    ),
}
TILES_OF = {
    "float8_block": dataclasses.replace(FLOAT8_BLOCK, two_d=True),
    "nvfp4": dataclasses.replace(NVFP4, two_d=True),
}


def test_the_names_are_those_that_recipe_knows() -> None:
    assert set(bs.recipe_names()) == set(FORMATS_OF)
    for name in bs.recipe_names():
        assert bs.recipe(name).name == name


@pytest.mark.parametrize("name", FORMATS_OF)
def test_a_recipe_gives_each_role_its_format(name: str) -> None:
    forward, gradient = FORMATS_OF[name]
    wanted = {
        Operand.INPUT: forward,
        Operand.WEIGHT: TILES_OF.get(name, forward),
        Operand.GRADIENT: gradient,
        Operand.PREACTIVATION: HIGH_PRECISION,
    }
    for role in ROLES:
        assert bs.recipe(name).format(role) == wanted[role.operand]


@pytest.mark.parametrize("name", FORMATS_OF)
def test_recipes_are_frozen_values(name: str) -> None:
    recipe = bs.recipe(name)
    assert recipe == bs.recipe(name)
    assert hash(recipe) == hash(bs.recipe(name))
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.name = "other"  # pyright: ignore[reportAttributeAccessIssue]


OPTIONS = {
    "float8_current": {"power_of_two": True, "epsilon": 1e-4},
    "float8_delayed": {"history": 4, "margin": 2, "most_recent": True},
}


@pytest.mark.parametrize(("name", "options"), OPTIONS.items(), ids=OPTIONS)
def test_options_reach_the_formats_of_all_operands(name: str, options: dict[str, Any]) -> None:
    recipe = bs.recipe(name, **options)
    for format in (recipe.input, recipe.weight, recipe.gradient):
        assert {key: getattr(format, key) for key in options} == options
    assert recipe != bs.recipe(name)


@pytest.mark.parametrize("name", FORMATS_OF)
def test_a_format_of_one_operand_can_be_given(name: str) -> None:
    recipe = bs.recipe(name, gradient=HIGH_PRECISION, preactivation=MXFP8)
    assert recipe.gradient is HIGH_PRECISION
    assert recipe.preactivation is MXFP8
    assert recipe.input == FORMATS_OF[name][0]


@pytest.mark.parametrize("name", FORMATS_OF)
@pytest.mark.parametrize("option", ["blocks", "choose", "hadamard"])
def test_an_unknown_option_is_refused(name: str, option: str) -> None:
    with pytest.raises(bs.RecipeError, match=option):
        bs.recipe(name, **{option: 3})


@pytest.mark.parametrize(
    ("name", "option"),
    [("mxfp8", "margin"), ("float8_current", "history"), ("float8_delayed", "power_of_two")],
)
def test_an_option_of_another_recipe_is_refused(name: str, option: str) -> None:
    with pytest.raises(bs.RecipeError, match="unknown"):
        bs.recipe(name, **{option: 1})


WRONG = [
    ("float8_delayed", {"history": 0}),
    ("float8_delayed", {"history": 2.5}),
    ("float8_delayed", {"history": True}),
    ("float8_delayed", {"margin": 0.5}),
    ("float8_delayed", {"margin": True}),
    ("float8_delayed", {"margin": 10**6}),
    ("float8_delayed", {"most_recent": 1}),
    ("float8_current", {"power_of_two": "yes"}),
    ("float8_current", {"epsilon": -1.0}),
    ("float8_current", {"epsilon": float("nan")}),
    ("float8_current", {"epsilon": float("inf")}),
    ("float8_current", {"epsilon": True}),
    ("mxfp8", {"input": "mxfp8"}),
    ("mxfp8", {"input": None}),
    ("mxfp8", {"preactivation": FLOAT8_DELAYED}),
    ("mxfp8", {"keep_high_precision": "*.head"}),
    ("mxfp8", {"keep_high_precision": (1,)}),
    ("mxfp8", {"keep_high_precision": None}),
]


@pytest.mark.parametrize(("name", "options"), WRONG, ids=lambda v: str(v))
def test_a_value_that_means_nothing_is_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(bs.RecipeError):
        bs.recipe(name, **options)


@pytest.mark.parametrize("name", ["mxfp4", "", None, 3, MXFP8, ["mxfp8"]], ids=str)
def test_an_unknown_name_is_refused_with_those_that_are_known(name: Any) -> None:
    with pytest.raises(bs.RecipeError, match=r"high_precision.*mxfp8"):
        bs.recipe(name)


@pytest.mark.parametrize(
    ("pattern", "keeps"),
    [
        ("layers.0.fc1", True),
        ("layers.0.*", True),
        ("*.fc1", True),
        ("*.fc2", False),
        ("layers.1.*", False),
        ("fc1", False),
        ("layers.?.fc[12]", True),
    ],
)
@pytest.mark.parametrize("container", [tuple, list])
def test_modules_can_be_kept_in_high_precision_by_name(
    pattern: str, keeps: bool, container: Any
) -> None:
    for recipe in (
        bs.recipe("mxfp8", keep_high_precision=container(["none", pattern])),
        bs.custom(lambda role: MXFP8, keep_high_precision=container(["none", pattern])),
    ):
        assert recipe.format(INPUT) == (HIGH_PRECISION if keeps else MXFP8)
        assert hash(recipe) is not None


def test_a_module_without_a_name_matches_no_pattern() -> None:
    recipe = bs.recipe("mxfp8", keep_high_precision=("*",))
    assert recipe.format(dataclasses.replace(INPUT, name="")) is MXFP8
    assert recipe.format(INPUT) is HIGH_PRECISION


def test_case_matters_in_patterns() -> None:
    assert bs.recipe("mxfp8", keep_high_precision=("Layers.*",)).format(INPUT) is MXFP8


def test_a_custom_recipe_is_asked_by_role() -> None:
    asked: list[Role] = []

    def choose(role: Role) -> bs.Format:
        asked.append(role)
        return MXFP8 if role.operand is Operand.WEIGHT else HIGH_PRECISION

    recipe = bs.custom(choose, name="weights_only")
    for role in ROLES:
        wanted = MXFP8 if role.operand is Operand.WEIGHT else HIGH_PRECISION
        assert recipe.format(role) is wanted
    assert asked == ROLES
    assert recipe.name == "weights_only"


@pytest.mark.parametrize("answer", [None, "mxfp8", Code.E4M3, bs.recipe("mxfp8")], ids=str)
def test_a_custom_recipe_that_gives_no_format_is_an_error(answer: Any) -> None:
    with pytest.raises(bs.RecipeError, match="function of recipe custom"):
        bs.custom(lambda role: answer).format(INPUT)


@pytest.mark.parametrize("function", [None, MXFP8, "mxfp8"], ids=str)
def test_custom_needs_a_function(function: Any) -> None:
    with pytest.raises(bs.RecipeError, match="needs a function"):
        bs.custom(function)


def test_custom_has_one_option() -> None:
    with pytest.raises(bs.RecipeError, match="keep_high_precision"):
        bs.custom(lambda role: MXFP8, input=MXFP8)


def test_a_learnt_scale_is_one_for_both_phases_of_an_operand() -> None:
    def choose(role: Role) -> bs.Format:
        return FLOAT8_DELAYED if role.phase is Phase.FORWARD else MXFP8

    recipe = bs.custom(choose)
    with pytest.raises(bs.RecipeError, match="both phases"):
        recipe.format(INPUT)
    gradient = Role(Operand.GRADIENT, Phase.FORWARD, "Linear")
    assert recipe.format(gradient) is FLOAT8_DELAYED
    assert bs.custom(lambda role: FLOAT8_DELAYED).format(INPUT) is FLOAT8_DELAYED


def test_a_preactivation_is_never_kept_with_a_learnt_scale() -> None:
    recipe = bs.custom(lambda role: FLOAT8_DELAYED)
    with pytest.raises(bs.RecipeError, match="preactivation"):
        recipe.format(Role(Operand.PREACTIVATION, Phase.BACKWARD, "GroupedMLP"))


def test_a_recipe_of_ones_own_is_checked_when_it_is_made() -> None:
    assert Recipe(name="mine", weight=MXFP8).format(INPUT) is HIGH_PRECISION
    with pytest.raises(bs.RecipeError, match=r"mine\.weight"):
        Recipe(name="mine", weight="mxfp8")  # pyright: ignore[reportArgumentType]
