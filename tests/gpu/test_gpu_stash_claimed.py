"""Steps of experts that compute in pages as CUDA graphs: bit-equal, whatever finds no room."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backstash.kernels import PoolState
from backstash.stash import CapturedStep, Stash, StepState
from claimed_cases import LAYERS, Experts, assert_equal
from stash_cases import assert_nothing_is_held

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("plain_memory")]

#: What is added to the scores of the experts that are here: nobody is sent to them, some, all.
NONE, SOME, ALL = -1e4, 0.0, 1e4


class Step:
    """A step whose tokens go where it is told."""

    def __init__(self, *handlers: Stash) -> None:
        self.experts = Experts("cuda")
        self.experts.x.requires_grad_(False)
        self.handlers = handlers
        self.calls = torch.zeros((), dtype=torch.int64, device="cuda")

    def __call__(self) -> Tensor:
        self.calls += 1
        loss = self.experts.loss(*self.handlers)
        loss.backward()
        return loss.detach()

    def gradients(self, run: Step | CapturedStep, load: float) -> list[Tensor]:
        for layer in self.experts.layers:
            layer.router.expert_bias[:4] = load  # pyright: ignore
        self.experts.layers.zero_grad()
        loss = run()
        grads = [p.grad.clone() for p in self.experts.layers.parameters() if p.grad is not None]
        return [loss.clone(), *grads]


@pytest.mark.parametrize("pages", [1, 10, 20, 40], ids=lambda pages: f"{pages} pages")
def test_an_overflow_at_any_layer_is_run_again_without_a_trace(pages: int) -> None:
    stash = Experts("cuda").stash(pages)
    plain, ours = Step(), Step(stash)
    captured = CapturedStep(ours, stash, [ours.experts.layers], state=[ours.calls])
    loads = [NONE, NONE, NONE, ALL, NONE, SOME, ALL]
    for load in loads:
        assert_equal(ours.gradients(captured, load), plain.gradients(plain, load))
        assert stash.is_idle
    assert captured.reruns >= 1
    # Neither a failed try nor a capture counts as a step.
    assert int(ours.calls) == int(plain.calls) == len(loads)
    assert stash.pool.counters()[PoolState.OVERFLOWS] == 0
    assert_nothing_is_held(stash)


def test_three_hundred_replays_with_changing_counts_are_bit_equal() -> None:
    stash = Experts("cuda").stash()
    plain, ours = Step(), Step(stash)
    captured = CapturedStep(ours, stash, [ours.experts.layers])
    loads = [NONE, -0.1, -0.05, SOME, 0.02, 0.07, ALL]
    wanted = [plain.gradients(plain, load) for load in loads]
    for turn in range(300):
        which = turn * 5 % len(loads)
        assert_equal(ours.gradients(captured, loads[which]), wanted[which])
    assert captured.state is StepState.CAPTURED
    assert (captured.reruns, captured.captures) == (0, 1)
    assert_nothing_is_held(stash)


def test_the_kernels_of_an_overflow_leave_zeros_and_a_flag() -> None:
    stash = Experts("cuda").stash(1)
    step = Step(stash)
    with stash.unattended():
        grads = step.gradients(step, ALL)
    counters = stash.pool.counters()
    assert counters[PoolState.OVERFLOWS] == LAYERS
    assert counters[PoolState.SHORTAGE] > 0
    assert counters[PoolState.FIRST_OVERFLOW] == 1
    assert all(bool(grad.isfinite().all()) for grad in grads)
    stash.pool.clear_overflow()
    assert_nothing_is_held(stash)
