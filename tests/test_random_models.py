"""Whatever the model, recipe, hooks and failures: gradients are those of a plain run."""

from __future__ import annotations

import pytest
import torch

import backstash as bs
from random_models import World, run_program

WORLD = World(
    device="cpu",
    features=64,
    inner=(16, 24, 64),
    dtypes=(torch.float32, torch.float32, torch.bfloat16, torch.float64),
    # Delayed scaling learns from one run to the next.
    recipes=[name for name in bs.recipe_names() if name != "float8_delayed"],
    shapes=((1,), (37,), (2, 90), (0,), (3, 1, 5)),
    page_bytes=4096,
)


@pytest.mark.parametrize("seed", range(60))
def test_whatever_hooks_and_failures_gradients_are_those_of_the_plain_run(seed: int) -> None:
    run_program(WORLD, seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_more_of_them() -> None:
    for seed in range(1000, 4000):
        run_program(WORLD, seed)
