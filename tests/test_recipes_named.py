"""Each recipe by name gives its operands the formats of its equations, as its options say."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import distributed

import backstash as bs
from backstash.formats import FLOAT8_BLOCK, FLOAT8_CURRENT, FLOAT8_ROWWISE, MXFP8, NVFP4, Code
from backstash.recipes import BackwardOverride, Operand, Phase, Role


def formats(name, **options):
    recipe = bs.recipe(name, **options)
    return recipe.input, recipe.weight, recipe.gradient


def test_float8_rowwise_is_e4m3_for_all():
    assert formats("float8_rowwise") == (FLOAT8_ROWWISE,) * 3
    wanted = dataclasses.replace(FLOAT8_ROWWISE, power_of_two=True, epsilon=0.5)
    assert formats("float8_rowwise", power_of_two=True, epsilon=0.5) == (wanted,) * 3


@pytest.mark.parametrize("two_d", [True, False])
def test_float8_block_has_tiles_for_weights_only(two_d):
    lines = dataclasses.replace(FLOAT8_BLOCK, power_of_two=False, epsilon=0.5)
    options = {"power_of_two": False, "epsilon": 0.5, "two_d": two_d}
    wanted = (lines, dataclasses.replace(lines, two_d=two_d), lines)
    assert formats("float8_block", **options) == wanted


def test_mxfp8_can_have_tiles_for_weights():
    assert formats("mxfp8") == (MXFP8,) * 3
    assert formats("mxfp8", two_d=True) == (MXFP8, dataclasses.replace(MXFP8, two_d=True), MXFP8)


def test_nvfp4_transforms_columns_and_draws_gradients():
    input = dataclasses.replace(NVFP4, hadamard=True)
    gradient = dataclasses.replace(input, stochastic_rounding=True)
    assert formats("nvfp4") == (input, dataclasses.replace(NVFP4, two_d=True), gradient)


NVFP4_OPTIONS = {
    "hadamard": (True, False, True),
    "stochastic_rounding": (False, False, True),
    "two_d": (False, True, False),
    "four_over_six": (True, True, True),
    "row_scaled": (True, False, True),
}


@pytest.mark.parametrize("option", NVFP4_OPTIONS)
def test_an_option_of_nvfp4_reaches_the_operands_it_is_for(option):
    off = dict.fromkeys(NVFP4_OPTIONS, False)
    assert formats("nvfp4", **off) == (NVFP4,) * 3
    on = formats("nvfp4", **(off | {option: True}))
    assert tuple(getattr(format, option) for format in on) == NVFP4_OPTIONS[option]


@pytest.mark.parametrize("option", NVFP4_OPTIONS)
def test_an_option_is_on_or_off(option):
    with pytest.raises(bs.RecipeError, match=f"{option} must be True or False, got 1"):
        bs.recipe("nvfp4", **{option: 1})


def test_the_group_of_float8_current_is_asked_for_inputs_and_gradients(tmp_path):
    with pytest.raises(bs.RecipeError, match="amax_group must be a process group"):
        bs.recipe("float8_current", amax_group="world")
    place = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    try:
        group = distributed.group.WORLD
        found: Any = formats("float8_current", amax_group=group)
        input, weight, gradient = found
        assert (input.amax_group, weight, gradient.amax_group) == (group, FLOAT8_CURRENT, group)
        assert gradient.code is Code.E5M2
        q = input.quantize(torch.tensor([[1.0, -2.0]]))
        assert q.dequantize().tolist() == [[1.0, -2.0]]
        assert "amax_group" not in input.spec()
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("name", bs.recipe_names())
def test_backward_override_changes_what_backward_reads(name):
    plain = bs.recipe(name)
    for override in BackwardOverride:
        recipe = bs.recipe(name, backward_override=override.value)
        assert recipe.backward_override is override
        for operand in Operand:
            forward = Role(operand, Phase.FORWARD, "Linear")
            backward = dataclasses.replace(forward, phase=Phase.BACKWARD)
            assert recipe.format(forward) == plain.format(forward)
            reads_again = override is BackwardOverride.DEQUANTIZED and operand in (
                Operand.INPUT,
                Operand.WEIGHT,
            )
            kept = operand is Operand.PREACTIVATION or reads_again
            wanted = plain.format(backward) if kept else bs.HIGH_PRECISION
            assert recipe.format(backward) == wanted


@pytest.mark.parametrize("wrong", ["high", True, 0, bs.MXFP8], ids=str)
def test_an_override_that_means_nothing_is_refused(wrong):
    with pytest.raises(bs.RecipeError, match=r"None or one of.*high_precision.*dequantized"):
        bs.recipe("mxfp8", backward_override=wrong)


def test_decoding_in_the_matmul_is_asked_for():
    assert bs.recipe("mxfp8").decode_in_matmul is False
    assert bs.recipe("mxfp8", decode_in_matmul=True).decode_in_matmul is True
    assert bs.custom(lambda role: MXFP8, decode_in_matmul=True).decode_in_matmul is True
    with pytest.raises(bs.RecipeError, match=r"decode_in_matmul must be True or False, got 1"):
        bs.recipe("mxfp8", decode_in_matmul=1)


def test_a_custom_recipe_can_have_an_override():
    recipe = bs.custom(lambda role: MXFP8, backward_override="high_precision")
    assert recipe.format(Role(Operand.INPUT, Phase.BACKWARD, "Linear")) is bs.HIGH_PRECISION
    assert recipe.format(Role(Operand.INPUT, Phase.FORWARD, "Linear")) is MXFP8
