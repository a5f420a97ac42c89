"""What layers that multiply save is left to the next matmuls, or is not copied at all."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import backstash as bs
from backstash import kernels
from backstash.errors import ModifiedError
from backstash.saving.hooks import announce_product
from backstash.stash import Policy, Stash
from stash_cases import (
    BALANCED,
    CAPACITY,
    WIDTH,
    Experts,
    assert_nothing_is_held,
    scale,
    stash,
    step,
)

LAYERS = 5


class Layers:
    """Layers that multiply and then save; each knows the storage that it saved."""

    def __init__(self, multiplies: bool = True) -> None:
        self.multiplies = multiplies
        self.saved: list[weakref.ref[Any]] = []

    def __call__(self, x: Tensor) -> Tensor:
        for _ in range(LAYERS):
            if self.multiplies:
                announce_product()
            marked = x * 2.0
            self.saved.append(weakref.ref(marked.untyped_storage()))
            bs.mark_grouped_tensor(marked, torch.tensor([CAPACITY]))
            x = marked.square()
        return x

    @property
    def alive(self) -> list[int]:
        """Which of the newest layers still have what they saved where it was."""
        return [i for i, storage in enumerate(self.saved[-LAYERS:]) if storage() is not None]


def rows() -> Tensor:
    return torch.full((CAPACITY, WIDTH), 0.5, requires_grad=True)


def run(kept: Stash, layers: Layers, x: Tensor | None = None) -> Tensor:
    with bs.saving(kept):
        return layers(rows() if x is None else x).sum()


def warm(kept: Stash) -> None:
    """A step, so that backward is known to come."""
    run(kept, Layers()).backward()


def test_in_the_first_step_everything_is_copied() -> None:
    kept = stash()
    loss = run(kept, Layers())
    assert kept.stats().batches == LAYERS
    del loss
    assert_nothing_is_held(kept)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_the_newest_stay_where_they_are_and_backward_takes_them_there(ahead: int) -> None:
    kept, layers, x = stash(ahead=ahead), Layers(), rows()
    warm(kept)
    before = kept.stats()
    loss = run(kept, layers, x)
    assert layers.alive == list(range(LAYERS - 1 - ahead, LAYERS))
    loss.backward()
    after = kept.stats()
    assert after.batches - before.batches == LAYERS - 1 - ahead
    assert after.untouched - before.untouched == 1 + ahead
    plain = rows()
    Layers()(plain).sum().backward()
    assert x.grad is not None
    assert plain.grad is not None
    assert torch.equal(x.grad, plain.grad)
    del loss
    assert_nothing_is_held(kept)


def test_layers_that_say_nothing_are_copied_at_once() -> None:
    kept, layers = stash(), Layers(multiplies=False)
    warm(kept)
    before = kept.stats().batches
    loss = run(kept, layers)
    assert kept.stats().batches - before == LAYERS
    del loss
    assert_nothing_is_held(kept)


def test_what_does_not_stay_is_left_to_the_next_matmuls_once_a_step_has_been_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, experts, left = stash(), Experts(LAYERS), []
    plain = kernels.stash_pages

    def noted(*operands: Any, **options: Any) -> None:
        left.append(options["moves"] is not None)
        plain(*operands, **options)

    monkeypatch.setattr(kernels, "stash_pages", noted)
    parameters = list(experts.parameters())
    # The newest stays where it is.
    for copies in ([False] * LAYERS, [True] * (LAYERS - 1)):
        step(experts, parameters, BALANCED, kept)
        assert left == copies
        left.clear()
    assert_nothing_is_held(kept)


@pytest.mark.parametrize(("pages", "few"), [(4096, False), (0, True)], ids=["device", "host"])
def test_what_may_go_over_the_link_is_copied_by_a_few_programs_and_no_matmul(
    pages: int, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, experts, seen = stash(pages, 4096), Experts(LAYERS), []
    for name in ("stash_pages", "restore_pages"):
        plain = getattr(kernels, name)

        def noted(*operands: Any, plain: Any = plain, **options: Any) -> None:
            seen.append((options["moves"] is None, options["programs"]))
            plain(*operands, **options)

        monkeypatch.setattr(kernels, name, noted)
    parameters = list(experts.parameters())
    for _ in range(3):
        seen.clear()
        step(experts, parameters, BALANCED, kept)
    if few:
        assert {alone for alone, _ in seen} == {True}
        assert {1 <= programs <= 64 for _, programs in seen} == {True}
    else:
        assert {programs for _, programs in seen} == {None}
        assert False in {alone for alone, _ in seen}


def test_in_another_order_what_stayed_makes_room() -> None:
    kept, layers = stash(), Layers()
    warm(kept)
    first, second = run(kept, Layers()), run(kept, layers)
    # Backward asks for what is oldest, so the newest have to go.
    first.backward()
    assert layers.alive == []
    second.backward()
    del first, second
    assert_nothing_is_held(kept)


def test_an_original_that_was_left_goes_when_the_next_layer_has_saved() -> None:
    kept, layers = stash(), Layers()
    for _ in range(2):
        # The second half of the round was asked for first, and nothing newer had come.
        first, second = run(kept, Layers()), run(kept, layers)
        second.backward()
        first.backward()
    first = run(kept, layers)
    # The matmuls of a next layer are yet to come.
    assert layers.alive == [LAYERS - 1]
    second = run(kept, Layers())
    assert layers.alive == []
    second.backward()
    first.backward()
    del first, second
    assert_nothing_is_held(kept)


def test_settling_copies_what_waits() -> None:
    kept, layers = stash(), Layers()
    warm(kept)
    before = kept.stats().batches
    loss = run(kept, layers)
    kept.settle()
    assert layers.alive == []
    assert kept.stats().batches - before == LAYERS
    loss.backward()
    del loss
    assert_nothing_is_held(kept)


def test_an_abandoned_graph_is_not_copied_afterwards() -> None:
    kept = stash()
    warm(kept)
    loss = run(kept, Layers())
    before = kept.stats().batches
    del loss
    assert_nothing_is_held(kept)
    kept.settle()
    assert kept.stats().batches == before


def test_a_retained_graph_finds_what_waits_again() -> None:
    kept, x = stash(), rows()
    warm(kept)
    loss = run(kept, Layers(), x)
    gradients = [torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(3)]
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])
    del loss
    assert_nothing_is_held(kept)


def test_a_change_in_place_of_what_waits_is_an_error() -> None:
    kept = stash()
    warm(kept)
    with bs.saving(kept):
        announce_product()
        marked = rows() * 2.0
        bs.mark_grouped_tensor(marked, torch.tensor([CAPACITY]))
        loss = marked.square().sum()
        marked.add_(1)
    with pytest.raises(ModifiedError, match="modified in place"):
        loss.backward()
    del loss
    assert_nothing_is_held(kept)


@pytest.mark.parametrize("policy", Policy, ids=lambda policy: policy.value)
def test_what_waits_gives_way_where_its_worst_case_leaves_no_room(policy: Policy) -> None:
    # A pool for the worst case of two layers and little more; each needs a tenth of its own.
    worst = -(-CAPACITY * WIDTH * 4 // 256)
    kept = stash(2 * worst + LAYERS * worst // 10, policy=policy, ahead=2)

    def run_scales() -> Tensor:
        x = rows()
        with bs.saving(kept):
            for _ in range(LAYERS):
                announce_product()
                x = scale(x, CAPACITY // 10)
            return x.sum()

    for _ in range(3):
        run_scales().backward()
    assert kept.stats().kept == 0
    assert_nothing_is_held(kept)


def test_compressed_values_never_wait() -> None:
    kept = stash(compress=bs.MXFP8)
    warm(kept)
    before = kept.stats().batches
    loss = run(kept, Layers())
    assert kept.stats().batches - before == LAYERS
    del loss
    assert_nothing_is_held(kept)


def test_a_graph_does_not_copy_what_came_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, layers = stash(), Layers()
    warm(kept)
    loss = run(kept, layers)
    before = kept.stats().batches
    monkeypatch.setattr(kept.pool.streams, "is_capturing", lambda: True)
    kept.settle()
    monkeypatch.undo()
    assert kept.stats().batches == before
    loss.backward()
    del loss
    assert_nothing_is_held(kept)


def test_a_graph_makes_no_moves_that_came_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = stash()
    warm(kept)
    with bs.saving(kept):
        announce_product()
        marked = rows() * 2.0
        bs.mark_grouped_tensor(marked, torch.tensor([CAPACITY]))
        loss = marked.square().sum()
    assert kept.multiply() is not None
    monkeypatch.setattr(kept.pool.streams, "is_capturing", lambda: True)
    assert kept.multiply() is None
    monkeypatch.undo()
    assert kept.multiply() is not None
    kept.settle()
    assert kept.multiply() is None
    loss.backward()
    del loss
    assert_nothing_is_held(kept)
