"""A recomputation is given what its forward computed: in both modes, nested in any way."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import backstash as bs
from backstash.recompute import in_checkpoint, is_recomputing, remember
from backstash.saving import saving
from saving_cases import Keeper, grad_of, identity

each_mode = pytest.mark.parametrize(
    "reentrant", [True, False], ids=["reentrant", "without_reentry"]
)
BOTH = pytest.mark.parametrize("early_stop", [True, False], ids=["early_stop", "to_the_end"])


class Draws:
    """A source that never gives the same twice, and what each run of a region got from it."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.computed = 0
        self.seen: list[int] = []

    def __call__(self) -> int:
        self.computed += 1
        return next(self._numbers)

    def region(self, x: Tensor) -> Tensor:
        for _ in range(3):
            number = remember(self)
            self.seen.append(number)
            x = torch.sin(x * number / 4)
        return x


def leaf() -> Tensor:
    return torch.linspace(-1, 1, 5).requires_grad_()


def plain_gradient() -> Tensor:
    x = leaf()
    return torch.autograd.grad(Draws().region(x).sum(), x)[0]


def run(function: Callable[[Tensor], Tensor], x: Tensor, **options: Any) -> Tensor:
    y = checkpoint(function, x, **options)
    assert isinstance(y, Tensor)
    return y


def test_outside_of_a_checkpoint_everything_is_computed() -> None:
    draws = Draws()
    with identity(), saving(Keeper()), save_on_cpu(pin_memory=False):
        draws.region(leaf())
    with torch.no_grad():
        draws.region(leaf())
    assert draws.seen == [1, 2, 3, 4, 5, 6]


@each_mode
@BOTH
@pytest.mark.parametrize("preserve", [True, False], ids=["keeps_random_state", "lets_it_go"])
def test_a_recomputation_gets_the_values_of_its_forward(
    reentrant: bool, early_stop: bool, preserve: bool
) -> None:
    draws, x = Draws(), leaf()
    with set_checkpoint_early_stop(early_stop):
        y = run(draws.region, x, use_reentrant=reentrant, preserve_rng_state=preserve)
        y.sum().backward()
    assert draws.seen == [1, 2, 3, 1, 2, 3]
    assert draws.computed == 3
    assert torch.equal(grad_of(x), plain_gradient())


@each_mode
def test_a_random_choice_is_the_same_without_the_random_state(reentrant: bool) -> None:
    seen: list[Tensor] = []

    def region(x: Tensor) -> Tensor:
        seen.append(remember(lambda: torch.rand(3)))
        return (x * seen[-1].sum()).sin()

    y = run(region, leaf(), use_reentrant=reentrant, preserve_rng_state=False)
    y.sum().backward()
    assert torch.equal(*seen)


@each_mode
@BOTH
def test_a_retained_graph_is_recomputed_with_the_same_values_each_time(
    reentrant: bool, early_stop: bool
) -> None:
    draws, x = Draws(), leaf()
    with set_checkpoint_early_stop(early_stop):
        y = run(draws.region, x, use_reentrant=reentrant).sum()
        for _ in range(3):
            y.backward(retain_graph=True)
    assert draws.seen == [1, 2, 3] * 4
    assert torch.equal(grad_of(x), plain_gradient() * 3)


def test_a_tensor_looked_at_outside_of_backward_is_recomputed_each_time() -> None:
    draws = Draws()
    y = run(draws.region, leaf(), use_reentrant=False)
    for _ in range(2):
        saved = y.grad_fn._saved_self  # pyright: ignore
        assert torch.isfinite(saved).all()
    y.sum().backward()
    assert draws.seen == [1, 2, 3] * 4


@each_mode
def test_two_regions_in_one_graph_have_values_of_their_own(reentrant: bool) -> None:
    draws, x = Draws(), leaf()
    y = run(draws.region, run(draws.region, x, use_reentrant=reentrant), use_reentrant=reentrant)
    y.sum().backward()
    assert draws.seen == [1, 2, 3, 4, 5, 6, 4, 5, 6, 1, 2, 3]


@each_mode
def test_the_same_region_may_run_backward_late_and_out_of_order(reentrant: bool) -> None:
    draws, x = Draws(), leaf()
    graphs = [run(draws.region, x, use_reentrant=reentrant).sum() for _ in range(3)]
    draws.seen.clear()
    for index in (1, 0, 2):
        graphs[index].backward()
    assert draws.seen == [4, 5, 6, 1, 2, 3, 7, 8, 9]


@each_mode
def test_a_value_computed_without_grad_inside_a_region_is_remembered(reentrant: bool) -> None:
    draws = Draws()

    def region(x: Tensor) -> Tensor:
        with torch.no_grad():
            number = remember(draws)
        draws.seen.append(number)
        return (x * number).sin()

    run(region, leaf(), use_reentrant=reentrant).sum().backward()
    assert draws.seen == [1, 1]


@each_mode
def test_none_and_false_are_remembered(reentrant: bool) -> None:
    answers = iter([None, False, True, True])
    seen: list[Any] = []

    def region(x: Tensor) -> Tensor:
        seen.extend([remember(lambda: next(answers)), remember(lambda: next(answers))])
        return x.sin()

    run(region, leaf(), use_reentrant=reentrant).sum().backward()
    assert seen == [None, False, None, False]


@each_mode
def test_an_exception_in_forward_leaves_nothing_behind(reentrant: bool) -> None:
    draws, x = Draws(), leaf()
    fails = True

    def region(x: Tensor) -> Tensor:
        y = draws.region(x)
        if fails:
            raise KeyError("broken")
        return y

    with pytest.raises(KeyError, match="broken"):
        run(region, x, use_reentrant=reentrant)
    fails = False
    run(region, x, use_reentrant=reentrant).sum().backward()
    assert draws.seen == [1, 2, 3, 4, 5, 6, 4, 5, 6]


@each_mode
def test_an_exception_in_recomputation_can_be_tried_again(reentrant: bool) -> None:
    draws, x = Draws(), leaf()
    fails = False

    def region(x: Tensor) -> Tensor:
        x = torch.cos(x * remember(draws))
        if fails:
            raise KeyError("broken")
        return draws.region(x)

    y = run(region, x, use_reentrant=reentrant).sum()
    fails = True
    with pytest.raises(KeyError, match="broken"):
        y.backward(retain_graph=True)
    fails = False
    draws.seen.clear()
    y.backward()
    assert draws.seen == [2, 3, 4]


@each_mode
def test_a_region_that_asks_for_more_the_second_time_is_an_error(reentrant: bool) -> None:
    def region(x: Tensor) -> Tensor:
        for _ in range(2 if is_recomputing() else 1):
            remember(lambda: 1)
        return x.sin()

    y = run(region, leaf(), use_reentrant=reentrant)
    with pytest.raises(bs.BackstashError, match="must do the same both times"):
        y.sum().backward()


class Value:
    """Something that can be weakly known."""


@each_mode
@pytest.mark.parametrize("end", ["backward", "dropped", "failed"])
def test_what_is_remembered_goes_with_the_graph(reentrant: bool, end: str) -> None:
    values: list[Any] = []

    def region(x: Tensor) -> Tensor:
        values.append(weakref.ref(remember(Value)))
        if end == "failed":
            raise KeyError("broken")
        return x.sin()

    gc.disable()
    try:
        y = None
        with contextlib.suppress(KeyError):
            y = run(region, leaf(), use_reentrant=reentrant)
        if end == "backward":
            assert y is not None
            y.sum().backward()
        del y
        if end == "failed":
            gc.collect()  # a traceback is a cycle
        assert [value() for value in values] == [None] * len(values)
    finally:
        gc.enable()


@each_mode
def test_a_call_knows_whether_it_runs_again(reentrant: bool) -> None:
    seen: list[tuple[bool, bool]] = []

    def region(x: Tensor) -> Tensor:
        seen.append((is_recomputing(), torch.is_grad_enabled() or in_checkpoint()))
        return x.sin()

    run(region, leaf(), use_reentrant=reentrant).sum().backward()
    assert seen == [(False, True), (True, True)]
    assert (is_recomputing(), in_checkpoint()) == (False, False)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@each_mode
def test_an_evaluation_through_a_checkpoint_is_no_training(reentrant: bool) -> None:
    seen: list[bool] = []

    def region(x: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled() or in_checkpoint())
        return x.sin()

    with torch.no_grad():
        run(region, leaf(), use_reentrant=reentrant)
        run(lambda x: run(region, x, use_reentrant=reentrant), leaf(), use_reentrant=reentrant)
    assert seen == [False, False]


@each_mode
def test_a_region_inside_a_region_is_training_too(reentrant: bool) -> None:
    seen: list[bool] = []

    def region(x: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled() or in_checkpoint())
        return x.sin()

    run(lambda x: run(region, x, use_reentrant=reentrant), leaf(), use_reentrant=True)
    assert seen == [True]


@each_mode
@pytest.mark.parametrize("where", ["same_thread", "other_thread"])
def test_threads_have_regions_of_their_own(reentrant: bool, where: str) -> None:
    wrong: list[Any] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        for _ in range(10):
            draws, x = Draws(), leaf()
            barrier.wait()
            y = run(draws.region, x, use_reentrant=reentrant).sum()
            barrier.wait()
            if where == "same_thread":
                y.backward()
            else:
                other = threading.Thread(target=y.backward)
                other.start()
                other.join()
            if draws.seen != [1, 2, 3] * 2 or not torch.equal(grad_of(x), want):
                wrong.append(draws.seen)

    want = plain_gradient()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# Torch says so of a reentrant region inside another, whose forward runs without grad.
no_grad_warning = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

AROUND: dict[str, Callable[[], Any]] = {
    "plain": contextlib.nullcontext,
    "saving": lambda: saving(Keeper()),
    "save_on_cpu": lambda: save_on_cpu(pin_memory=False),
    "identity": identity,
}
MODES = {"reentrant": True, "without_reentry": False}
KINDS = [*AROUND, *MODES]
Nest = tuple[str, list[Any]]


def run_nest(nest: Nest, x: Tensor, draw: Callable[[], int], plainly: bool) -> Tensor:
    kind, inner = nest

    def body(x: Tensor) -> Tensor:
        x = torch.sin(x * remember(draw) / 4)
        for part in inner:
            x = run_nest(part, x, draw, plainly)
        return torch.cos(x + remember(draw))

    if plainly:
        return body(x)
    if kind in MODES:
        return run(body, x, use_reentrant=MODES[kind])
    with AROUND[kind]():
        return body(x)


def check_nest(nest: Nest) -> None:
    results = []
    for plainly in (True, False):
        draws, x = Draws(), leaf()
        y = run_nest(nest, x, draws, plainly).sum()
        y.backward(retain_graph=True)
        y.backward()
        results.append((grad_of(x), draws.computed))
    (want, computed), (grad, computed_nested) = results
    assert torch.equal(want, grad)
    assert computed == computed_nested


@no_grad_warning
@pytest.mark.parametrize("inner", KINDS)
@pytest.mark.parametrize("outer", KINDS)
def test_pairs_of_regions_and_hooks_nest(outer: str, inner: str) -> None:
    check_nest((outer, [(inner, []), (inner, [("plain", [])])]))


NESTS = st.recursive(
    st.tuples(st.sampled_from(KINDS), st.just([])),
    lambda inner: st.tuples(st.sampled_from(KINDS), st.lists(inner, max_size=3)),
    max_leaves=6,
)


@no_grad_warning
@settings(max_examples=60, deadline=None)
@given(nest=NESTS, early_stop=st.booleans())
def test_any_nest_of_regions_and_hooks_gives_the_gradients_of_none(
    nest: Nest, early_stop: bool
) -> None:
    with set_checkpoint_early_stop(early_stop):
        check_nest(nest)
