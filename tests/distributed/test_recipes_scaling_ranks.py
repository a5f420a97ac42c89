"""Processes that hold parts of a batch learn the scales that one process learns from all of it."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks as Pool
from torch.utils.checkpoint import checkpoint

from backstash import recipe
from backstash.errors import RecipeError
from backstash.formats import FLOAT8_CURRENT, FLOAT8_DELAYED
from backstash.nn import Linear
from backstash.nn.module import scaling_state
from backstash.recipes import autocast

pytestmark = pytest.mark.distributed

ROWS, STEPS, HISTORY = 12, 4, 3


class Spy:
    """Counts the collectives, and how many magnitudes each of them brings together."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._reduce = dist.all_reduce

    def __enter__(self) -> Spy:
        def count(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.sizes.append(x.numel())
            return self._reduce(x, *args, **kwargs)

        dist.all_reduce = count
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_reduce = self._reduce


def two_layers() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(Linear(8, 6), Linear(6, 4))


def learn(model: Any, chosen: Any, rows: slice, how: str = "plain", steps: int = STEPS) -> None:
    """Some steps, each on other rows, with magnitudes that grow and shrink."""
    generator = torch.Generator().manual_seed(5)
    for step in range(steps):
        factor = (1.0, 30.0, 0.01, 2.0)[step % 4]
        x = factor * torch.randn(ROWS, 8, generator=generator)
        dy = factor * torch.randn(ROWS, 4, generator=generator)
        parts = [rows] if how != "microbatches" else halves(rows)
        with autocast(recipe=chosen):
            for part in parts:
                mine = x[part].requires_grad_()
                if how in ("recomputed", "reentrant"):
                    y: Any = checkpoint(model, mine, use_reentrant=how == "reentrant")
                else:
                    y = model(mine)
                y.backward(dy[part])


def halves(rows: slice) -> list[slice]:
    middle = (rows.start + rows.stop) // 2
    return [slice(rows.start, middle), slice(middle, rows.stop)]


def scales_of(model: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return {name: scaling.settled() for name, scaling in scaling_state(model).items()}


def assert_equal(got: Any, wanted: Any) -> None:
    assert got.keys() == wanted.keys()
    for name in wanted:
        assert all(map(torch.equal, got[name], wanted[name])), name


def check_scales(group: dist.ProcessGroup, rows: list[slice], how: str, recent: bool) -> None:
    options: dict[str, Any] = {"history": HISTORY, "most_recent": recent}
    whole, mine = two_layers(), two_layers()
    learn(whole, recipe("float8_delayed", **options), slice(0, ROWS))
    chosen = recipe("float8_delayed", amax_group=group, **options)
    with Spy() as spy:
        learn(mine, chosen, rows[dist.get_rank(group)], how)
    wanted = scales_of(whole)
    # The second layer is given what the first made of quantized values: those of the first step
    # are the same, so are the scales, and so is all that follows.
    assert_equal(scales_of(mine), wanted)
    assert all((scale != 1).all() for _, scale in wanted.values())
    passes = 2 if how == "microbatches" else 1
    assert spy.sizes == ([2] * passes + [2]) * STEPS  # two gradients a pass, then two inputs


EVEN = [slice(0, 6), slice(6, 12)]
UNEVEN = [slice(0, 12), slice(12, 12)]  # one of the processes has no rows


@pytest.mark.parametrize("rows", [EVEN, UNEVEN], ids=["even", "one-has-none"])
@pytest.mark.parametrize("how", ["plain", "microbatches", "recomputed", "reentrant"])
@pytest.mark.parametrize("recent", [False, True], ids=["largest", "most-recent"])
def test_parts_learn_the_scales_of_the_whole(
    ranks: Pool, rows: list[slice], how: str, recent: bool
) -> None:
    ranks.run(check_scales, rows, how, recent)


def check_alone(group: dist.ProcessGroup) -> list[float]:
    """Without a group each process learns from its own rows."""
    model = two_layers()
    learn(model, recipe("float8_delayed"), EVEN[dist.get_rank(group)], steps=1)
    return [scale.item() for _, scale in scales_of(model).values()]


def test_without_a_group_every_process_learns_alone(ranks: Pool) -> None:
    one, two = ranks.run(check_alone)
    assert one != two


def check_quiet(group: dist.ProcessGroup) -> None:
    model, chosen = two_layers(), recipe("float8_delayed", amax_group=group)
    with Spy() as spy:
        with torch.no_grad(), autocast(recipe=chosen):
            model(torch.randn(3, 8))
        FLOAT8_DELAYED.quantize(torch.randn(3, 8), scale=torch.tensor([0.7]))
        fails = torch.nn.Sequential(*model, torch.nn.Linear(1, 1))
        with pytest.raises(RuntimeError, match="shapes"), autocast(recipe=chosen):
            fails(torch.randn(3, 8))
        assert spy.sizes == []


def test_an_evaluation_and_a_step_that_fails_ask_nobody(ranks: Pool) -> None:
    ranks.run(check_quiet)


def check_copies(group: dist.ProcessGroup) -> None:
    model, chosen = two_layers(), recipe("float8_delayed", amax_group=group, history=HISTORY)
    rows = EVEN[dist.get_rank(group)]
    learn(model, chosen, rows, steps=2)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), two_layers()]
    copies[2].load_state_dict(model.state_dict())
    learn(model, chosen, rows)
    for again in copies:
        learn(again, chosen, rows)
        assert_equal(scales_of(again), scales_of(model))


def test_copies_pickles_and_state_dicts_hold_no_group_and_learn_on_in_it(ranks: Pool) -> None:
    ranks.run(check_copies)


def test_only_inputs_and_gradients_are_parts_of_something(ranks: Pool) -> None:
    ranks.run(check_roles)


def check_roles(group: dist.ProcessGroup) -> None:
    made: Any = recipe("float8_delayed", amax_group=group)
    assert made.input.amax_group is made.gradient.amax_group is group
    assert made.weight.amax_group is None
    assert made.input.spec() == FLOAT8_DELAYED.spec()


@pytest.mark.parametrize("format", [FLOAT8_CURRENT, FLOAT8_DELAYED], ids=lambda f: f.name)
def test_what_is_no_group_is_refused(format: Any) -> None:
    with pytest.raises(RecipeError, match="amax_group must be a process group"):
        dataclasses.replace(format, amax_group="world")
