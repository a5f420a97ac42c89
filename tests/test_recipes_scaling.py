"""Delayed scaling learns a scale by the published rule, bit for bit."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

import backstash as bs
from backstash import FLOAT8_DELAYED
from backstash.formats import Code
from backstash.nn.module import scaling_state
from backstash.recipes import DelayedScaling
from scaling_cases import Definition, L

INF, NAN = math.inf, math.nan
TINY = 1e-44  # so small that the scale for it is infinite in float32
CPU = torch.device("cpu")


def format_of(**options: Any) -> Any:
    return dataclasses.replace(FLOAT8_DELAYED, history=L, **options)


AMAXES = {
    "growing": [1, 2, 3, 4, 5, 6],
    "shrinking": [6, 5, 4, 3, 2, 1, 0.5],
    "zero_first": [0, 0, 3, 1],
    "zero_between": [3, 0, 0, 1, 0, 7],
    "infinite": [3, INF, 1, 1, 1, 1, 1],
    "tiny": [TINY, TINY, TINY, TINY, TINY],
    "tiny_then_large": [TINY, 3, TINY, TINY, TINY, TINY],
    "huge": [3e38, 1, 1],
}


@pytest.mark.parametrize("amaxes", AMAXES.values(), ids=AMAXES)
@pytest.mark.parametrize("margin", [0, 3, -2])
@pytest.mark.parametrize("most_recent", [False, True], ids=["largest", "most_recent"])
@pytest.mark.parametrize("code", Code)
@pytest.mark.parametrize("history", [1, 2, 4])
def test_the_update_is_the_published_rule(
    amaxes: list[float], margin: int, most_recent: bool, code: Code, history: int
) -> None:
    format = dataclasses.replace(
        FLOAT8_DELAYED, history=history, margin=margin, most_recent=most_recent, code=code
    )
    scaling, definition = DelayedScaling(format, 1, CPU), Definition(format)
    for amax in amaxes:
        scaling.update(torch.tensor([float(amax)]))
        definition.step(amax)
        assert scaling.scale_G.item() == definition.scale
        assert scaling.history_LG[:, 0].tolist() == definition.history


@pytest.mark.parametrize("amax", [math.nan, INF], ids=str)
@pytest.mark.parametrize("most_recent", [False, True], ids=["largest", "most_recent"])
def test_a_magnitude_that_is_not_finite_keeps_the_scale_while_it_counts(
    amax: float, most_recent: bool
) -> None:
    scaling = DelayedScaling(format_of(most_recent=most_recent), 1, CPU)
    scaling.update(torch.tensor([2.0]))
    scales = []
    for seen in (amax, *[4.0] * (L + 1)):
        scaling.update(torch.tensor([seen]))
        scales.append(scaling.scale_G.item())
    kept = 1 if most_recent else L
    assert scales == [224.0] * kept + [112.0] * (len(scales) - kept)


def test_a_tensor_of_nan_has_no_magnitude_to_learn_from() -> None:
    layer = bs.Linear(4, 4)
    with bs.autocast(recipe="float8_delayed"):
        layer(torch.full((2, 4), math.nan))
    learnt = {name: scaling.scale_G.item() for name, scaling in scaling_state(layer).items()}
    assert learnt["input"] == 1.0
    assert learnt["weight"] == (torch.tensor(448.0) / layer.weight.detach().abs().max()).item()


def test_each_group_has_a_scale_of_its_own() -> None:
    scaling = DelayedScaling(format_of(), 3, CPU)
    for amax_G in ([1.0, 0.0, INF], [2.0, 4.0, 1.0], [0.0, 1.0, 1.0]):
        scaling.update(torch.tensor(amax_G))
    alone = []
    for g, amaxes in enumerate([[1.0, 2.0, 0.0], [0.0, 4.0, 1.0], [INF, 1.0, 1.0]]):
        one = DelayedScaling(format_of(), 1, CPU)
        for amax in amaxes:
            one.update(torch.tensor([amax]))
        alone.append(one.scale_G.item())
        assert torch.equal(scaling.history_LG[:, g], one.history_LG[:, 0])
    assert scaling.scale_G.tolist() == alone


def test_an_update_replaces_the_tensors_that_calls_hold() -> None:
    scaling = DelayedScaling(format_of(), 1, CPU)
    held = scaling.scale_G
    scaling.update(torch.tensor([2.0]))
    assert held.item() == 1.0


def test_other_options_take_effect_and_keep_what_was_seen() -> None:
    scaling = DelayedScaling(format_of(), 1, CPU)
    for amax in (8.0, 4.0, 2.0):
        scaling.update(torch.tensor([amax]))
    assert scaling.scale_G.item() == 448 / 8
    scaling.follow(format_of(margin=1))
    assert scaling.scale_G.item() == 224 / 8
    scaling.follow(format_of(most_recent=True))
    assert scaling.scale_G.item() == 448 / 2
    scaling.follow(dataclasses.replace(format_of(), history=2))
    assert scaling.history_LG[:, 0].tolist() == [4.0, 2.0]
    assert scaling.scale_G.item() == 448 / 4
    scaling.follow(dataclasses.replace(format_of(), history=5))
    assert scaling.history_LG[:, 0].tolist() == [0, 0, 0, 4.0, 2.0]


def test_a_saved_state_of_another_shape_is_refused() -> None:
    scaling = DelayedScaling(format_of(), 1, CPU)
    with pytest.raises(bs.CheckpointError, match="recipe options"):
        scaling.load(torch.zeros(L + 1, 1), torch.ones(1))
    with pytest.raises(bs.CheckpointError, match="recipe options"):
        scaling.load(torch.zeros(L, 2), torch.ones(2))
