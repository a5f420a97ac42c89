"""A step whose graph finds no room is undone and run again, and nobody can tell.

The graph here is a stand-in on the CPU: it runs the step where the host does not watch, and
writes its results where the first recording left them, as a CUDA graph does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backstash as bs
from backstash.errors import ConfigError, DeviceError
from backstash.nn.module import scaling_state
from backstash.stash import CapturedStep, PagePool, Patience, Sizing, Stash, StepState
from backstash.stash.captured_step import CudaRecorder
from stash_cases import CAPACITY, PAGE, WIDTH, Experts, assert_nothing_is_held

# The newest two stay where they are once a step has been seen, the others are stashed.
STASHED, LAYERS = 3, 5


class Standin:
    """Runs a step as a graph would: unattended, into tensors that stay where they are."""

    def __init__(self, model: Model, stash: Stash) -> None:
        self.model = model
        self.stash = stash
        self.step: Callable[[], Any] | None = None
        self.outputs: Any = None
        self.gradients: list[Tensor | None] = []
        self.forgotten = 0

    def run(self, step: Callable[[], Any]) -> Any:
        return step()

    def record(self, step: Callable[[], Any]) -> Any:
        """Recording runs nothing: whatever the step changed is as it was."""
        scalings = scaling_state(self.model).values()
        learnt = [x for one in scalings for x in (one.history_LG, one.scale_G)]
        changing = [*self.model.buffers(), self.model.routed, *learnt]
        before = [tensor.clone() for tensor in changing]
        random_state = torch.get_rng_state()
        with self.stash.unattended():
            self.outputs = step()
        torch.set_rng_state(random_state)
        for tensor, value in zip(changing, before, strict=True):
            tensor.copy_(value)
        self.stash.pool.clear_overflow()
        self.step = step
        self.gradients = [p.grad for p in self.model.parameters()]
        return self.outputs

    def replay(self) -> None:
        assert self.step is not None
        for parameter in self.model.parameters():
            parameter.grad = None
        with self.stash.unattended():
            self.outputs.copy_(self.step())
        for parameter, gradient in zip(self.model.parameters(), self.gradients, strict=True):
            assert gradient is not None
            assert parameter.grad is not None
            gradient.copy_(parameter.grad)

    def forget(self) -> None:
        self.step = None
        self.forgotten += 1


class Model(nn.Module):
    """Experts with what a failed step must not touch: counts, a bias, dropout."""

    steps: Tensor
    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts(LAYERS)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("bias", torch.zeros(4))
        self.routed = torch.zeros(4)  # no buffer, as the counts of a router
        # Nobody can write to these.
        self.mask = torch.ones(1).expand(4)
        self.seen = torch.ones(2, requires_grad=True) * 2

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        self.steps += 1
        self.bias += counts
        self.routed += counts
        for layer in self.experts.layers:
            x = x + nn.functional.dropout(layer(x, counts), 0.5)
        return x


class Training:
    """A few steps of training with a captured step, or without anything."""

    def __init__(
        self,
        pages: int | None,
        sizing: Sizing | None = None,
        calm: int = 64,
        recipe: str = "high_precision",
    ) -> None:
        torch.manual_seed(5)
        self.recipe = recipe
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.x = torch.randn(CAPACITY, WIDTH)
        self.counts = torch.zeros(4, dtype=torch.int64)
        self.random_state = torch.get_rng_state()
        self.run: Callable[[], Any] = self.step
        self.stash: Stash | None = None
        if pages is not None:
            pool = PagePool(pages * PAGE, device="cpu", page_bytes=PAGE, sizing=sizing)
            self.stash = Stash(pool)
            self.recorder = Standin(self.model, self.stash)
            self.run = self.captured = CapturedStep(
                self.step,
                self.stash,
                [self.model],
                recorder=self.recorder,
                patience=Patience(calm=calm),
            )

    def step(self) -> Tensor:
        handlers = [self.stash] if self.stash else []
        with bs.autocast(recipe=self.recipe), bs.saving(*handlers):
            y = self.model(self.x * 1.0, self.counts)
            mask = torch.arange(CAPACITY) < self.counts.sum()
            loss = torch.where(mask[:, None], y, 0.0).square().sum()
        loss.backward()
        return loss.detach()

    def losses(self, schedule: list[int]) -> list[float]:
        losses = []
        torch.set_rng_state(self.random_state)
        for rows in schedule:
            self.counts.copy_(torch.tensor([rows, 0, rows // 2, 0]))
            self.optimizer.zero_grad()
            losses.append(float(self.run()))
            self.optimizer.step()
        self.random_state = torch.get_rng_state()
        return losses


STEADY = [4] * 8
BURST = [4, 4, 4, 4, 30, 4, 4, 30, 4]
RISING = [2, 2, 4, 8, 12, 16, 20, 24, 28, 32]


@pytest.mark.parametrize("schedule", [STEADY, BURST, RISING], ids=["steady", "burst", "rising"])
@pytest.mark.parametrize("pages", [0, 100, 4000])
@pytest.mark.parametrize("recipe", ["high_precision", "float8_delayed"])
def test_training_is_bit_equal_to_one_that_never_overflowed(
    pages: int, schedule: list[int], recipe: str
) -> None:
    plain, captured = Training(None, recipe=recipe), Training(pages, recipe=recipe)
    assert captured.losses(schedule) == plain.losses(schedule)
    for one, two in zip(
        captured.model.state_dict().values(), plain.model.state_dict().values(), strict=True
    ):
        assert torch.equal(one, two)
    assert torch.equal(captured.model.routed, plain.model.routed)
    assert captured.stash is not None
    assert_nothing_is_held(captured.stash)
    assert captured.captured.captures >= 1
    assert scaling_state(captured.model).keys() == scaling_state(plain.model).keys()
    fits = pages == 4000 or (pages == 100 and schedule is STEADY)
    assert (captured.captured.reruns == 0) == fits


def test_scales_that_a_checkpoint_brings_are_those_that_are_used() -> None:
    plain, captured = (Training(pages, recipe="float8_delayed") for pages in (None, 4000))
    states = []
    for training in (plain, captured):
        training.losses(STEADY)
        states.append({name: t.clone() for name, t in training.model.state_dict().items()})
        training.losses([9, 9])
    for training, state in zip((plain, captured), states, strict=True):
        training.model.load_state_dict(state)
    assert captured.losses(STEADY) == plain.losses(STEADY)
    assert captured.captured.captures == 2
    assert captured.captured.state is StepState.CAPTURED


def test_an_autocast_around_a_captured_step_that_learns_scales_is_refused() -> None:
    training = Training(4000, recipe="float8_delayed")
    with (
        pytest.raises(ConfigError, match="enter autocast in the step"),
        bs.autocast(recipe="float8_delayed"),
    ):
        training.losses(STEADY)


def test_a_burst_is_run_again_once_and_then_fits() -> None:
    training = Training(100)
    training.losses([4] * 4)
    assert training.captured.state is StepState.CAPTURED
    training.losses([30])
    assert (training.captured.reruns, training.captured.captures) == (1, 2)
    assert training.stash is not None
    assert training.stash.stats().growths == 1
    assert training.stash.stats().overflows == 0
    training.losses([30, 30, 4, 30])
    assert (training.captured.reruns, training.captured.captures) == (1, 2)


def test_a_pool_that_may_not_grow_does_not_rerun_every_step() -> None:
    limited = Training(100, Sizing(most_bytes=100 * PAGE))
    plain = Training(None)
    schedule = [4] * 4 + [30] * 40
    assert limited.losses(schedule) == plain.losses(schedule)
    # Pauses of 1, 2, 4, 8, 16 steps: six overflows in forty steps, not forty.
    assert 4 <= limited.captured.reruns <= 6


@pytest.mark.parametrize("layer", range(STASHED))
def test_an_overflow_in_any_layer_is_noticed_and_says_where(layer: int) -> None:
    training, plain = Training(4000), Training(None)
    schedule = [10] * 3
    assert training.losses(schedule) == plain.losses(schedule)
    assert training.stash is not None
    used = training.stash.stats().demand_high
    pool = training.stash.pool
    # Room for the layers before this one; held by someone else is the rest.
    pool.is_fixed = False
    pool._replace(used * layer // LAYERS + 1)
    assert training.losses([10]) == plain.losses([10])
    assert training.captured.reruns == 1
    assert training.losses(schedule) == plain.losses(schedule)


def test_each_overflow_soon_after_another_doubles_the_pause() -> None:
    patience = Patience(calm=3, longest=6)
    assert [patience.overflowed() for _ in range(4)] == [1, 2, 4, 6]
    for _ in range(3):
        patience.replayed()
    assert patience.overflowed() == 1


def test_a_step_that_leaves_something_stashed_is_not_captured() -> None:
    training = Training(4000)
    kept: list[Tensor] = []

    def leaving() -> Tensor:
        assert training.stash is not None
        with bs.saving(training.stash):
            kept[:] = [training.model(training.x * 1.0, training.counts)]
        return kept[0].detach()

    assert training.stash is not None
    step = CapturedStep(leaving, training.stash, [training.model], recorder=training.recorder)
    training.counts.fill_(4)
    step()
    with pytest.raises(ConfigError, match="must leave nothing stashed"):
        step()
    assert step.state is StepState.EAGER


def test_other_tensors_that_a_step_changes_are_put_back_too() -> None:
    training = Training(100)
    metric = torch.zeros(())

    def measured() -> Tensor:
        loss = training.step()
        metric.add_(1)
        return loss

    assert training.stash is not None
    standin = Standin(training.model, training.stash)
    step = CapturedStep(
        measured, training.stash, [training.model], state=[metric], recorder=standin
    )
    training.run = step
    training.losses([4, 4])
    count = float(metric)
    training.losses([30])
    assert step.reruns == 1
    assert float(metric) == count + 1 + 1  # the rerun, and the stand-in's recording after it


def test_an_activation_that_a_module_shows_is_not_kept_alive() -> None:
    model: Any = Model()
    model.shown = next(model.parameters()) * 2
    stash = Stash(PagePool(4 * PAGE, device="cpu", page_bytes=PAGE))
    step = CapturedStep(torch.Tensor, stash, [model], recorder=Standin(model, stash))
    shown = weakref.ref(model.shown)
    del model.shown
    assert shown() is None
    assert step.state is StepState.EAGER


def test_a_pool_on_the_cpu_has_no_cuda_graph() -> None:
    with pytest.raises(DeviceError, match="needs a pool on a GPU, got one on cpu"):
        CudaRecorder(torch.device("cpu"))
