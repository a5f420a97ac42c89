"""Pages live exactly as long as autograd can still ask for what is in them."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import backstash as bs
from backstash.errors import ModifiedError
from backstash.stash import Stash
from stash_cases import (
    BALANCED,
    CAPACITY,
    WIDTH,
    Copying,
    Experts,
    assert_nothing_is_held,
    pool,
    scale,
    stash,
    step,
)


def rows() -> Tensor:
    return torch.randn(CAPACITY, WIDTH, requires_grad=True)


def used(kept: Stash) -> int:
    return kept.stats().device_used


def test_the_pool_is_empty_after_backward() -> None:
    kept = stash()
    with bs.saving(kept):
        loss = scale(rows(), 9).sum()
    assert used(kept) > 0
    loss.backward()
    assert used(kept) == 0
    assert_nothing_is_held(kept)


def test_an_abandoned_graph_leaks_nothing() -> None:
    kept = stash()
    with bs.saving(kept):
        y = scale(scale(rows(), 9), 11)
    assert used(kept) > 0
    del y
    assert_nothing_is_held(kept)


def test_a_graph_that_is_garbage_in_a_cycle_leaks_nothing() -> None:
    kept = stash()
    with bs.saving(kept):
        cycle: list[Any] = [scale(rows(), 9)]
    cycle.append(cycle)
    del cycle
    assert_nothing_is_held(kept)


def test_a_retained_graph_gives_the_same_gradients_twice_and_then_its_pages() -> None:
    kept, x = stash(), rows()
    with bs.saving(kept):
        loss = scale(scale(x, 9), 11).sum()
    held = used(kept)
    gradients = []
    for _ in range(3):
        x.grad = None
        loss.backward(retain_graph=True)
        assert x.grad is not None
        gradients.append(x.grad)
        assert used(kept) == held
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])
    del loss
    assert_nothing_is_held(kept)


def test_a_retained_graph_of_experts_gives_the_same_gradients_twice() -> None:
    experts, kept = Experts(3), stash()
    x = torch.randn(CAPACITY, WIDTH, requires_grad=True)
    with bs.saving(kept):
        loss = experts(x * 1.0)[: sum(BALANCED)].sum()
    weight = experts.get_parameter("layers.0.fc1_weight")
    first = torch.autograd.grad(loss, weight, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, weight)[0])
    del loss
    assert_nothing_is_held(kept)


class _Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise OSError("in backward")


def test_an_exception_in_forward_leaks_nothing_and_the_next_step_is_right() -> None:
    experts, kept = Experts(2), stash()
    parameters = list(experts.parameters())

    def failing(x: Tensor, counts: object) -> Tensor:
        experts(x)
        raise OSError("in forward")

    with pytest.raises(OSError, match="in forward"):
        step(failing, parameters, BALANCED, kept)
    assert_nothing_is_held(kept)
    step(experts, parameters, BALANCED, kept).assert_equal(step(experts, parameters))


def test_an_exception_in_backward_leaks_nothing_and_the_next_step_is_right() -> None:
    experts, kept = Experts(2), stash()
    parameters = list(experts.parameters())

    def failing(x: Tensor, counts: object) -> Tensor:
        return experts(_Fail.apply(experts(x)))

    with pytest.raises(OSError, match="in backward"):
        step(failing, parameters, BALANCED, kept)
    assert_nothing_is_held(kept)
    step(experts, parameters, BALANCED, kept).assert_equal(step(experts, parameters))


def test_the_original_goes_before_the_next_layer_needs_memory() -> None:
    kept = stash()
    originals: list[weakref.ref[Any]] = []
    x = rows()
    with bs.saving(kept):
        for _ in range(4):
            marked = x * 2.0
            originals.append(weakref.ref(marked.untyped_storage()))
            bs.mark_grouped_tensor(marked, torch.tensor([3]))
            x = marked.tanh() + marked.square()
            del marked
            # Saved tensors that are not for the stash pass by meanwhile.
            x = x.exp().exp().exp()
            gc.collect()
            assert [storage() for storage in originals] == [None] * len(originals)


def test_a_value_that_two_nodes_save_is_stashed_once() -> None:
    kept, x = stash(), rows()
    marked = x * 1.0
    bs.mark_grouped_tensor(marked, torch.tensor([CAPACITY]))
    with bs.saving(kept):
        loss = (marked.square() + marked.sin()).sum()
    assert kept.stats().bytes_stashed == marked.nbytes
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * marked.detach() + marked.detach().cos())
    del loss
    assert_nothing_is_held(kept)


def test_an_input_changed_in_place_while_it_is_copied_is_an_error_not_a_wrong_gradient() -> None:
    kept, x = stash(), rows()
    marked = x * 1.0
    bs.mark_grouped_tensor(marked, torch.tensor([CAPACITY]))
    with bs.saving(kept):
        loss = marked.sin().sum()
        marked.add_(1)
    with pytest.raises(ModifiedError, match="modified in place"):
        loss.backward()
    del loss
    assert_nothing_is_held(kept)


def test_two_stashes_share_a_pool_and_nothing_else() -> None:
    shared = pool()
    one, two = Stash(shared), Stash(shared)
    with bs.saving(one):
        first = scale(rows(), 9).sum()
    with bs.saving(two):
        second = scale(rows(), 10).sum()
    assert one.stats().batches == two.stats().batches == 1
    assert one.stats().bytes_stashed == (9 + 10) * WIDTH * 4
    first.backward()
    second.backward()
    assert_nothing_is_held(shared)


def test_the_inner_of_two_nested_stashes_keeps_the_value() -> None:
    outer, inner = stash(), stash()
    with bs.saving(outer), bs.saving(inner):
        loss = scale(rows(), 9).sum()
    assert (outer.stats().batches, inner.stats().batches) == (0, 1)
    loss.backward()
    assert_nothing_is_held(inner)


def test_what_the_inner_has_no_room_for_goes_to_the_outer() -> None:
    outer, inner = stash(), stash(1)
    with bs.saving(outer), bs.saving(inner):
        loss = scale(rows(), 9).sum()
    assert (outer.stats().batches, inner.stats().kept) == (1, 1)
    loss.backward()
    assert_nothing_is_held(outer)
    assert_nothing_is_held(inner)


def test_threads_with_a_stash_in_common_do_not_disturb_one_another() -> None:
    kept = stash(600, 600)
    failures: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for turn in range(15):
            x = torch.randn(CAPACITY, WIDTH, generator=generator).requires_grad_()
            count = (seed * 7 + turn) % (CAPACITY + 2)
            with bs.saving(kept):
                loss = scale(scale(x, count, 1.0), count, 1.0).sum()
            loss.backward()
            expected = torch.ones_like(x)
            expected[:count] += 2 * x.detach()[:count]
            if x.grad is None or not torch.allclose(x.grad, expected, atol=1e-5):
                failures.append(f"seed {seed}, turn {turn}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert_nothing_is_held(kept)


def test_backward_may_run_on_another_thread() -> None:
    kept, x = stash(), rows()
    with bs.saving(kept):
        loss = scale(x, 9).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert x.grad is not None
    del loss
    assert_nothing_is_held(kept)


def test_building_and_deleting_stashes_leaves_no_object_behind() -> None:
    for _ in range(3):
        kept = stash()
        step(Experts(1), [], BALANCED, kept)
        gone = weakref.ref(kept.pool)
        del kept
        gc.collect()
        assert gone() is None


MICROBATCHES = {
    "one after another": [0, -1, 1, -2, 2, -3],
    "all forward, then all backward": [0, 1, 2, -3, -2, -1],
    "first in, first out": [0, 1, 2, -1, -2, -3],
    "interleaved": [0, 1, -1, 2, -2, -3],
    "one is abandoned": [0, 1, 2, -1, -3],
    "one more": [0, 1, 2, 3, -2, -4, -1, -3],
}


@pytest.mark.parametrize("copies", [False, True], ids=["in place", "copied"])
def test_any_order_of_microbatches_gives_the_same_gradients_without_a_schedule(
    copies: bool,
) -> None:
    experts, kept = Experts(2), stash()
    handler = Copying(kept) if copies else kept
    inputs = [torch.randn(CAPACITY, WIDTH) for _ in range(4)]

    def gradients(order: list[int], *handlers: Any) -> dict[int, Tensor]:
        losses: dict[int, Tensor] = {}
        found = {}
        for turn in order:
            if turn >= 0:
                with bs.saving(*handlers):
                    losses[turn] = experts(inputs[turn].clone().requires_grad_() * 1.0)[:28].sum()
            else:
                experts.zero_grad()
                losses.pop(-turn - 1).backward()
                weight = experts.get_parameter("layers.0.fc2_weight").grad
                assert weight is not None
                found[-turn - 1] = weight.clone()
        return found

    for order in MICROBATCHES.values():
        for batch, gradient in gradients(order, handler).items():
            assert torch.equal(gradient, gradients([batch, -batch - 1])[batch])
        # Evaluation in between saves nothing and disturbs nothing.
        with torch.no_grad(), bs.saving(kept):
            experts(inputs[0])
        assert_nothing_is_held(kept)
    statistics = kept.stats()
    assert (statistics.surprises > 0) == copies
    assert (statistics.in_place > 0) != copies


def test_errors_are_raised_and_gradients_right_under_python_O() -> None:
    program = (
        "import torch, backstash as bs\n"
        "from backstash.stash import PagePool, Stash\n"
        "from backstash.errors import ConfigError\n"
        "try:\n    PagePool(1, page_bytes=3)\nexcept ConfigError:\n    print('refused')\n"
        "stash = Stash(PagePool(1 << 20, device='cpu', page_bytes=64))\n"
        "mlp = bs.GroupedMLP(2, 32, 32)\n"
        "x = torch.randn(64, 32)\n"
        "def grad(*h):\n"
        "    mlp.zero_grad()\n"
        "    with bs.saving(*h): y = mlp(x, [5, 6])\n"
        "    y.sum().backward()\n"
        "    return mlp.fc1_weight.grad.clone()\n"
        "print(torch.equal(grad(), grad(stash)), stash.stats().batches)\n"
    )
    done = subprocess.run([sys.executable, "-O", "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["refused", "True", "1"], done.stderr
