"""A stash beside others: sharded weights, the compiler, a second captured step, a long run."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backstash as bs
from backstash.stash import Stash, Take
from nn_cases import shard
from stash_cases import (
    BALANCED,
    CAPACITY,
    WIDTH,
    Experts,
    assert_nothing_is_held,
    poisoned,
    stash,
    step,
)
from test_stash_captured_step import Training


@pytest.mark.parametrize("recipe", ["high_precision", "mxfp8", "nvfp4"])
def test_experts_whose_weights_are_shards_are_stashed_and_gather_the_very_same_objects(
    recipe: str,
) -> None:
    def gradients(*handlers: Any) -> list[Tensor]:
        torch.manual_seed(1)
        experts = Experts(3)
        shards = [one for layer in experts.layers for one in shard(layer)]
        x = poisoned(CAPACITY, BALANCED).requires_grad_()
        with bs.autocast(recipe=recipe), bs.saving(*handlers):
            loss = experts(x * 1.0)[: sum(BALANCED)].square().sum()
        loss.backward()
        assert len(shards) == 6
        for one in shards:
            assert one.asked.count("forward") == one.asked.count("backward") == 1
        assert x.grad is not None
        return [x.grad[: sum(BALANCED)], *(p.grad for p in experts.parameters())]  # pyright: ignore

    kept = stash()
    for ours, theirs in zip(gradients(kept), gradients(), strict=True):
        assert torch.equal(ours, theirs)
    assert kept.stats().bytes_stashed > 0
    assert_nothing_is_held(kept)


@pytest.mark.parametrize("pages", [4096, 0])
@pytest.mark.parametrize("whole", [False, True], ids=["with layers of ours", "one graph"])
def test_a_stash_around_a_compiled_model_changes_no_gradient(pages: int, whole: bool) -> None:
    torch.compiler.reset()
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]
    if not whole:
        layers += [bs.LayerNormMLP(WIDTH, 64), nn.Tanh()]
    model = nn.Sequential(*layers)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=whole)
    kept = stash(pages, take=Take.ALL)

    def gradients(run: Any, *handlers: Any) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(2)
        x = torch.randn(CAPACITY, WIDTH, requires_grad=True)
        with bs.saving(*handlers):
            loss = run(x).square().sum()
        loss.backward()
        return [loss.detach(), x.grad, *(p.grad for p in model.parameters())]  # pyright: ignore

    expected = gradients(compiled)
    for _ in range(3):
        for ours, theirs in zip(gradients(compiled, kept), expected, strict=True):
            assert torch.equal(ours, theirs)
    for plain, theirs in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(plain, theirs)
    assert (kept.stats().bytes_stashed > 0) == (pages > 0)
    assert_nothing_is_held(kept)
    torch.compiler.reset()


def test_two_captured_steps_take_turns_and_know_nothing_of_one_another() -> None:
    schedules = [[4, 4, 4, 30, 4, 4], [30, 2, 2, 2, 9, 30]]
    alone = [Training(None).losses(schedule) for schedule in schedules]
    both = [Training(100), Training(40)]
    losses: list[list[float]] = [[], []]
    for turn in range(6):
        for one, schedule, found in zip(both, schedules, losses, strict=True):
            found += one.losses([schedule[turn]])
    assert losses == alone
    for one in both:
        assert one.captured.captures >= 1
        assert one.stash is not None
        assert_nothing_is_held(one.stash)


def test_any_step_may_skip_layers_and_freeze_others() -> None:
    experts, kept = Experts(4), stash(300, 100)
    parameters = list(experts.parameters())
    for turn in range(16):
        run, frozen = 5 * turn % 16, 7 * turn % 16
        for i, layer in enumerate(experts.layers):
            layer.requires_grad_(not frozen >> i & 1)

        def some(x: Tensor, counts: Any, run: int = run) -> Tensor:
            for i, layer in enumerate(experts.layers):
                x = x + layer(x, torch.tensor(counts)).tanh() if run >> i & 1 else x
            return x

        step(some, parameters, BALANCED, kept).assert_equal(step(some, parameters, BALANCED))
        assert kept.stats().device_used == kept.stats().host_used == 0
    assert_nothing_is_held(kept)


class Failure(Exception):
    pass


def _failing(x: Tensor, counts: Any, experts: Experts) -> Tensor:
    experts(x, counts)
    raise Failure


def long_run(kept: Stash, experts: Experts, rounds: int) -> None:
    """Steps of one to four microbatches, of which some are dropped and some fail."""
    parameters = list(experts.parameters())
    for turn in range(rounds):
        counts = (turn % 12, 0, turn % 7, 3)
        losses = []
        for _ in range(1 + turn % 4):
            with bs.saving(kept):
                y = experts(poisoned(CAPACITY, counts).requires_grad_() * 1.0, counts)
                losses.append(y[: sum(counts)].sum())
        if turn % 3 == 1:
            losses.pop(0)  # this one never runs backward
        for loss in losses:
            loss.backward()
        if turn % 5 == 2:
            with pytest.raises(Failure):
                step(lambda x, c: _failing(x, c, experts), parameters, counts, kept)


def objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def test_a_long_run_with_dropped_and_failed_steps_leaves_no_object_and_no_page() -> None:
    kept, experts = stash(400, 200), Experts(3)
    long_run(kept, experts, 20)
    before = objects()
    long_run(kept, experts, 60)
    # A tensor, a handle or an entry of a dict that stayed of each step would be 60.
    assert objects() - before < 30
    assert_nothing_is_held(kept)
