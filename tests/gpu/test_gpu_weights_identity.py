"""On a GPU, too, backward asks the very object that forward asked, saved tensors in pinned memory.

The product of layers, ways, recipes and places of gradients is that of the tests on the CPU.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from nn_cases import RECIPES, WAYS, Case
from test_weights_protocol_identity import (
    ALL,
    DELIVERIES,
    WITHOUT_OPTIONS,
    options_of,
    replaced,
    run,
)

pytestmark = pytest.mark.gpu

PINNED = "save_on_cpu pinned"


def save_in_pinned_memory() -> Any:
    """Torch's hooks, which would make their copy on the default device that a test has set."""
    hooks: Any = torch.autograd.graph.save_on_cpu(pin_memory=True)
    hooks.pack_hook = functools.partial(on_cpu, hooks.pack_hook)
    return hooks


def on_cpu(pack: Any, tensor: Tensor) -> Any:
    with torch.device("cpu"):
        kept = pack(tensor)
    assert kept[1].is_pinned()
    return kept


@pytest.fixture(autouse=True)
def pinned_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WAYS, PINNED, (save_in_pinned_memory, WAYS["no hook"][1]))


def made_on_gpu(arguments: Any) -> Any:
    with torch.device("cuda"):
        return arguments()


def on_gpu(
    case: Case, recipe: str, way: str, delayed: bool, fused: bool
) -> tuple[list[Tensor], list[list[str]]]:
    """Outputs and gradients of a step, and what each weight was asked."""
    # Recomputation asks for the arguments again, on a thread with no default device of its own.
    case = dataclasses.replace(case, arguments=functools.partial(made_on_gpu, case.arguments))
    with torch.device("cuda"):
        module = case.make(**options_of(case, delayed, fused))
        shards = replaced(module)
        came = run(case, module, recipe, way, is_delayed=delayed)
    assert all(t.is_cuda for t in came)
    return came, [shard.asked for shard in shards]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_backward_asks_the_same_object_and_every_bit_is_that_of_no_hook(
    case: Case, recipe: str
) -> None:
    deliveries = DELIVERIES[:1] if case.name in WITHOUT_OPTIONS else DELIVERIES
    for delayed, fused in deliveries:
        wanted, _ = on_gpu(case, recipe, "no hook", delayed, fused)
        for way in (PINNED, "save_on_cpu", "nested hooks", "checkpoint", "checkpoint reentrant"):
            what = f"{way}, delayed={delayed}, fused={fused}"
            came, asked = on_gpu(case, recipe, way, delayed, fused)
            for words in asked:
                assert words.count("forward") == (2 if "checkpoint" in way else 1), what
                assert words.count("backward") == 1, what
                assert words.count("finalize") == 1, what
                assert words.count("grad_buffer") == fused, what
            assert len(came) == len(wanted)
            pairs = itertools.zip_longest(came, wanted)
            assert all(torch.equal(a, b) for a, b in pairs), what
