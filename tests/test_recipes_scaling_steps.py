"""Delayed scaling takes one update for each step that went well, whatever a step consists of."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import backstash as bs
from backstash.recipes import Step
from saving_cases import grad_of
from scaling_cases import RECIPE, Definition, batches, model, noted, state, step


def test_a_step_notes_each_operand_once() -> None:
    net = model(1)
    definitions = {
        "0.input": Definition(RECIPE.input),
        "0.weight": Definition(RECIPE.weight),
        "0.gradient": Definition(RECIPE.gradient),
    }
    for _, x in zip(range(6), batches(), strict=False):
        with bs.autocast(recipe=RECIPE):
            y = net(x)
        before = net[0].weight.detach().abs().max().item()  # pyright: ignore
        dy = 2 * y.detach()
        y.square().sum().backward()
        amaxes = [x.abs().max().item(), before, dy.abs().max().item()]
        for definition, amax in zip(definitions.values(), amaxes, strict=True):
            definition.step(amax)
        assert state(net) == {
            key: [definition.scale, *definition.history] for key, definition in definitions.items()
        }
        with torch.no_grad():
            net[0].weight.mul_(1.5)  # pyright: ignore


def test_forward_scales_move_when_autocast_is_left_and_gradients_after_backward() -> None:
    net = model()
    with bs.autocast(recipe=RECIPE):
        y = net(next(batches()))
        assert all(scale == 1 for scale, *_ in state(net).values())
    moved = {key for key, (scale, *_) in state(net).items() if scale != 1}
    assert moved == {"0.input", "0.weight", "1.input", "1.weight"}
    y.sum().backward()
    assert all(scale != 1 for scale, *_ in state(net).values())


def test_nested_autocasts_are_one_step() -> None:
    net, reference = model(), model()
    x = next(batches())
    step(reference, x)
    with bs.autocast(recipe="mxfp8"):
        with bs.autocast(recipe=RECIPE):
            y = net(x)
        assert all(scale == 1 for scale, *_ in state(net).values())
    y.square().sum().backward()
    assert state(net) == state(reference)


@pytest.mark.parametrize("where", ["each_inside", "all_inside", "each_outside", "reversed"])
def test_microbatches_of_one_autocast_are_one_step(where: str) -> None:
    net = model()
    losses: list[Tensor] = []
    xs = [x * factor for x, factor in zip(batches(), (1, 3, 2), strict=False)]
    with bs.autocast(recipe=RECIPE):
        for x in xs:
            losses.append(net(x).square().sum())
            if where == "each_inside":
                losses.pop().backward()
        if where == "all_inside":
            torch.stack(losses).sum().backward()
            losses.clear()
    for loss in reversed(losses) if where == "reversed" else losses:
        assert noted(net, "1.gradient") == []
        loss.backward()
    assert noted(net, "0.input") == [max(x.abs().max().item() for x in xs)]
    assert {key: len(noted(net, key)) for key in state(net)} == dict.fromkeys(state(net), 1)


def test_microbatches_with_an_autocast_each_are_steps() -> None:
    net = model()
    for _, x in zip(range(3), batches(), strict=False):
        step(net, x)
    assert {len(noted(net, key)) for key in state(net)} == {3}


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "without_reentry"])
@pytest.mark.parametrize("nested", [False, True], ids=["once", "nested"])
def test_recomputation_notes_nothing_twice_and_changes_no_bit(
    reentrant: bool, nested: bool
) -> None:
    def run(layers: nn.Module, x: Tensor) -> Any:
        if nested:
            return checkpoint(lambda x: checkpoint(layers, x, use_reentrant=False), x,
                              use_reentrant=reentrant)  # fmt: skip
        return checkpoint(layers, x, use_reentrant=reentrant)

    plain, again = model(), model()
    for _, x in zip(range(5), batches(), strict=False):
        x.requires_grad_()
        step(plain, x)
        want, x.grad = grad_of(x), None
        step(again, x, run)
        assert torch.equal(want, grad_of(x))
        assert state(plain) == state(again)
        for one, other in zip(plain.parameters(), again.parameters(), strict=True):
            assert torch.equal(grad_of(one), grad_of(other))


@pytest.mark.parametrize("where", ["after_forward", "after_backward", "in_backward"])
def test_a_step_that_fails_inside_autocast_changes_nothing(where: str) -> None:
    net = model()
    step(net, next(batches()))
    before = state(net)

    def fail(gradient: Tensor) -> None:
        raise KeyError("broken")

    def run() -> None:
        with bs.autocast(recipe=RECIPE):
            y = net(100 * next(batches()))
            if where == "in_backward":
                net[0].bias.register_hook(fail)  # pyright: ignore
            if where != "after_forward":
                y.sum().backward()
            raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        run()
    assert state(net) == before
    reference = model()
    net[0].bias._backward_hooks = None  # pyright: ignore
    for x, _ in zip(batches(), range(2), strict=False):
        step(reference, x)
        if _:
            step(net, x)
    assert state(net) == state(reference)


def test_a_backward_that_fails_leaves_the_gradients_history() -> None:
    net = model()
    step(net, next(batches()))
    before = state(net)
    with bs.autocast(recipe=RECIPE):
        y = net(100 * next(batches()))
    handle = net[1].weight.register_hook(lambda gradient: gradient.missing)  # pyright: ignore
    with pytest.raises(AttributeError, match="missing"):
        y.sum().backward()
    handle.remove()
    del y
    step(net, next(batches()))
    assert noted(net, "1.gradient")[:1] == before["1.gradient"][-1:]
    assert len(noted(net, "1.gradient")) == 2
    assert max(noted(net, "1.gradient")) < 50


def test_an_evaluation_changes_nothing() -> None:
    net = model()
    step(net, next(batches()))
    before = state(net)
    x = 100 * next(batches())
    with torch.no_grad(), bs.autocast(recipe=RECIPE):
        net(x)
    with bs.autocast(recipe=RECIPE), torch.no_grad():
        net(x)
        checkpoint(net, x, use_reentrant=False)
    with bs.autocast(recipe=RECIPE), torch.inference_mode():
        net(x)
    assert state(net) == before


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_an_evaluation_through_a_reentrant_checkpoint_changes_nothing() -> None:
    net = model()
    step(net, next(batches()))
    before = state(net)
    with bs.autocast(recipe=RECIPE), torch.no_grad():
        checkpoint(net, 100 * next(batches()), use_reentrant=True)
    assert state(net) == before


def test_an_evaluation_in_the_middle_of_a_step_does_not_touch_it() -> None:
    net, reference = model(), model()
    x = next(batches())
    step(reference, x)
    with bs.autocast(recipe=RECIPE):
        y = net(x)
    with torch.no_grad(), bs.autocast(recipe=RECIPE):
        net(100 * x)
    y.square().sum().backward()
    assert {k: v[1:] for k, v in state(net).items()} == {
        k: v[1:] for k, v in state(reference).items()
    }


@pytest.mark.parametrize("frozen", [0, 1], ids=["first", "last"])
def test_a_frozen_layer_holds_no_other_back(frozen: int) -> None:
    net = model()
    net[frozen].requires_grad_(False)
    for count, x in zip(range(1, 4), batches(), strict=False):
        step(net, x)
        trained = 1 - frozen
        assert len(noted(net, f"{trained}.gradient")) == count
        assert len(noted(net, f"{frozen}.input")) == count
    assert len(noted(net, f"{frozen}.gradient")) == (3 if frozen == 1 else 0)


@pytest.mark.parametrize("alive", [True, False], ids=["graph_alive", "graph_gone"])
def test_a_call_whose_backward_never_runs_delays_no_other(alive: bool) -> None:
    net, reference, side = model(), model(), model(1)
    kept: list[Tensor] = []
    for count, x in zip(range(1, 4), batches(), strict=False):
        with bs.autocast(recipe=RECIPE):
            aside = side(x)
            y = net(x)
        if alive:
            kept.append(aside)
        del aside
        y.square().sum().backward()
        del y
        step(reference, x)
        if not alive:
            assert state(net) == state(reference)
        # Where something is still waited for, a checkpoint has what the next step will use.
        saved = net.state_dict()["1.delayed_scaling.gradient.history"]
        assert len(saved[:, 0].nonzero()) == count
        assert torch.equal(saved, reference.state_dict()["1.delayed_scaling.gradient.history"])
    for one, other in zip(net.parameters(), reference.parameters(), strict=True):
        assert torch.equal(grad_of(one), grad_of(other))


def test_a_second_backward_through_a_retained_graph_is_no_second_step() -> None:
    net = model()
    step(net, next(batches()))
    net.zero_grad()
    with bs.autocast(recipe=RECIPE):
        loss = net(next(batches())).square().sum()
    loss.backward(retain_graph=True)
    once = state(net)
    first = [grad_of(p).clone() for p in net.parameters()]
    net.zero_grad()
    loss.backward()
    assert state(net) == once
    assert all(torch.equal(grad_of(p), g) for p, g in zip(net.parameters(), first, strict=True))


def test_steps_in_flight_together_are_noted_apart() -> None:
    net = model()
    xs = list(itertools.islice(batches(), 3))
    losses = []
    for x in xs:
        with bs.autocast(recipe=RECIPE):
            losses.append(net(x).square().sum())
    for loss in losses:
        loss.backward()
    assert noted(net, "0.input") == [x.abs().max().item() for x in xs]
    assert len(noted(net, "1.gradient")) == 3


def test_a_copy_in_the_middle_of_a_step_is_whole() -> None:
    net = model()
    step(net, next(batches()))
    with bs.autocast(recipe=RECIPE):
        y = net(next(batches()))
        twin = copy.deepcopy(net)
        before = state(twin)
    y.square().sum().backward()
    assert state(twin) == before
    reference = copy.deepcopy(net)
    x = next(batches())
    step(net, x)
    step(reference, x)
    assert state(net) == state(reference)


def test_a_step_and_its_graph_are_freed_without_the_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[weakref.ref[Step]] = []

    def leave(entered: Step, *, learns: bool) -> None:
        made.append(weakref.ref(entered))
        of_library(entered, learns=learns)

    of_library = Step.leave
    monkeypatch.setattr(Step, "leave", leave)
    gc.disable()
    try:
        net = model()
        for _, x in zip(range(3), batches(), strict=False):
            step(net, x)
        assert [alive() for alive in made] == [None] * 3
    finally:
        gc.enable()


def test_a_state_that_is_loaded_is_not_changed_by_what_an_open_step_has_noted() -> None:
    net, other = model(), model()
    for x in itertools.islice(batches(), 3):
        step(other, x)
    saved = copy.deepcopy(other.state_dict())
    x = next(batches())
    with bs.autocast(recipe=RECIPE):
        first, second = net(x), net(x)
    first.sum().backward()  # noted, and not taken in: the other backward is to come
    net.load_state_dict(saved)
    del second
    now = net.state_dict()
    assert now.keys() == saved.keys()
    assert all(torch.equal(now[key], saved[key]) for key in saved)
