"""With the stash every gradient is that of a run without it, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import backstash as bs
from backstash.stash import Policy, Stash, Tail, Take
from stash_cases import (
    BALANCED,
    CAPACITY,
    COUNTS,
    PAGE,
    WIDTH,
    Copying,
    Experts,
    Result,
    assert_nothing_is_held,
    scale,
    stash,
    step,
)

Model = Callable[..., Tensor]
# Every recipe with one expert that has all rows, and every distribution in a few recipes.
THOROUGH = ("none", "mxfp8", "nvfp4")
PAIRS = [(recipe, "one hot") for recipe in bs.recipe_names() if recipe not in THOROUGH] + [
    (recipe, name) for recipe in THOROUGH for name in COUNTS
]


def in_recipe(model: Model, name: str) -> Model:
    def run(x: Tensor, counts: Sequence[int]) -> Tensor:
        with bs.autocast(
            enabled=name != "none", recipe=None if name == "none" else bs.recipe(name)
        ):
            return model(x, counts)

    return run


def checkpointed(model: Model, *, reentrant: bool) -> Model:
    return lambda x, counts: checkpoint(model, x, counts, use_reentrant=reentrant)


def on_cpu(model: Model) -> Model:
    def run(x: Tensor, counts: Sequence[int]) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return model(x, counts)

    return run


AROUND: dict[str, Callable[[Model], Model]] = {
    "plain": lambda model: model,
    "checkpoint": lambda model: checkpointed(model, reentrant=False),
    "reentrant checkpoint": lambda model: checkpointed(model, reentrant=True),
    "save_on_cpu": on_cpu,
}


@pytest.mark.parametrize(("recipe", "name"), PAIRS, ids=" ".join)
def test_experts_have_the_same_gradients_in_every_recipe(recipe: str, name: str) -> None:
    counts = COUNTS[name]

    def two_steps(*handlers: Stash) -> Result:
        # Delayed scaling learns from step to step, so each run has a model of its own.
        experts = Experts(2)
        model, parameters = in_recipe(experts, recipe), list(experts.parameters())
        step(model, parameters, counts, *handlers)
        return step(model, parameters, counts, *handlers)

    kept = stash()
    two_steps(kept).assert_equal(two_steps())
    assert_nothing_is_held(kept)
    statistics = kept.stats()
    assert statistics.batches > 0
    assert statistics.kept == statistics.overflows == 0


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("recipe", ["none", "mxfp8"])
def test_the_stash_composes_with_recomputation_and_other_hooks(
    recipe: str, around: Callable[[Model], Model]
) -> None:
    experts, kept = Experts(3), stash()
    model, parameters = around(in_recipe(experts, recipe)), list(experts.parameters())
    expected = step(model, parameters)
    step(model, parameters, BALANCED, kept).assert_equal(expected)
    assert_nothing_is_held(kept)


@pytest.mark.parametrize("policy", Policy, ids=lambda policy: policy.value)
@pytest.mark.parametrize(
    ("pages", "host_pages"), [(4096, 0), (40, 4096), (0, 4096), (40, 0), (0, 0)]
)
def test_no_pool_is_too_small(policy: Policy, pages: int, host_pages: int) -> None:
    experts = Experts(3)
    parameters = list(experts.parameters())
    kept = stash(pages, host_pages, policy=policy)
    step(experts, parameters, BALANCED, kept).assert_equal(step(experts, parameters))
    assert_nothing_is_held(kept)
    statistics = kept.stats()
    assert statistics.overflows == 0
    assert (statistics.kept > 0) == (pages < 4096 and (host_pages == 0 or policy is Policy.KEEP))
    assert (statistics.pages_spilled > 0) == (pages < 4096 and not statistics.kept)


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
def test_looking_ahead_changes_nothing_but_the_count(ahead: int) -> None:
    experts, kept = Experts(4), stash(ahead=ahead)
    parameters = list(experts.parameters())
    expected = step(experts, parameters)
    for _ in range(3):
        step(experts, parameters, BALANCED, Copying(kept)).assert_equal(expected)
    assert_nothing_is_held(kept)
    statistics = kept.stats()
    assert statistics.surprises == 0
    assert (statistics.foreseen > 0) == (ahead > 0)


def test_a_stash_that_takes_all_gives_plain_layers_the_same_gradients() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3), torch.nn.GELU(), torch.nn.Flatten(), torch.nn.Linear(144, 5)
    )
    x = torch.randn(8, 2, 8, 8).contiguous(memory_format=torch.channels_last)
    kept = stash(take=Take.ALL)

    def gradients(*handlers: object) -> list[Tensor]:
        model.zero_grad()
        with bs.saving(*handlers):  # pyright: ignore[reportArgumentType]
            loss = model(x.transpose(2, 3)).square().sum()
        loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients()
    for ours, theirs in zip(gradients(kept), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert kept.stats().batches > 0
    assert_nothing_is_held(kept)


def test_a_plain_model_whose_buffer_is_marked_keeps_the_valid_rows_alone() -> None:
    rows = torch.tensor([5])
    weight = torch.randn(WIDTH, 2 * WIDTH, requires_grad=True)

    def gradient(*handlers: object) -> tuple[Tensor, Tensor]:
        weight.grad = None
        x = torch.randn(CAPACITY, WIDTH, generator=torch.Generator().manual_seed(0))
        with bs.saving(*handlers):  # pyright: ignore[reportArgumentType]
            h = x @ weight
            bs.mark_grouped_tensor(h, rows)
            gate, up = h.chunk(2, dim=1)
            # Both halves are views of one marked buffer, saved by two nodes.
            y = torch.nn.functional.silu(gate) * up
            loss = y[:5].square().sum()
        loss.backward()
        assert weight.grad is not None
        return loss, weight.grad

    # silu's backward multiplies every row with its gradient, which is zero past the valid ones.
    kept = stash(tail=Tail.ZEROS)
    for ours, theirs in zip(gradient(kept), gradient(), strict=True):
        assert torch.equal(ours, theirs)
    statistics = kept.stats()
    assert statistics.bytes_stashed == 5 * 2 * WIDTH * 4
    assert_nothing_is_held(kept)


LENGTHS = [0, 1, 7, 8, 9, CAPACITY - 1, CAPACITY, CAPACITY + 1]


@pytest.mark.parametrize("rows", LENGTHS)
def test_exactly_the_valid_rows_are_copied(rows: int) -> None:
    kept = stash()
    x = torch.randn(CAPACITY, WIDTH, requires_grad=True)
    with bs.saving(kept):
        y = scale(x, rows) + scale(x, rows)
    valid = min(rows, CAPACITY)
    assert kept.stats().bytes_stashed == 2 * valid * WIDTH * 4
    assert kept.stats().device_used == 2 * -(-valid * WIDTH * 4 // PAGE)
    y.sum().backward()
    assert x.grad is not None
    expected = torch.full_like(x, 4.0)
    expected[:valid] += 2 * x.detach()[:valid]
    torch.testing.assert_close(x.grad, expected, rtol=0, atol=1e-5)
    assert_nothing_is_held(kept)
