"""Random models on a GPU, where experts compute in pages: gradients are those of a plain run."""

from __future__ import annotations

import pytest
import torch

from random_models import World, run_program

pytestmark = pytest.mark.gpu

WORLD = World(
    device="cuda",
    features=512,
    inner=(256,),
    dtypes=(torch.bfloat16,),
    recipes=("high_precision",),  # each other one has kernels of its own to compile
    shapes=((37,), (2, 300), (0,)),
    page_bytes=1 << 16,
)


@pytest.mark.parametrize("chunk", range(4))
def test_whatever_hooks_and_failures_gradients_are_those_of_the_plain_run(chunk: int) -> None:
    for seed in range(chunk * 15, chunk * 15 + 15):
        run_program(WORLD, seed)
