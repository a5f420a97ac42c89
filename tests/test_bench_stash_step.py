"""The benchmark of a step compares gradients before it times."""

from __future__ import annotations

import pytest
import torch

from backstash.bench import stash_step
from backstash.bench.workloads import IMBALANCES
from backstash.errors import ConfigError
from backstash.stash import PagePool, Stash

CPU = torch.device("cpu")
SHAPE = stash_step.SHAPES["cpu"]


@pytest.mark.parametrize("factor", stash_step.FACTORS)
@pytest.mark.parametrize("imbalance", IMBALANCES)
def test_every_imbalance_gives_the_same_gradients(imbalance: str, factor: float) -> None:
    step = stash_step.Step(SHAPE, factor, imbalance, CPU)
    stash = Stash(PagePool(1 << 24, device=CPU, page_bytes=256))
    losses = []
    for _ in range(stash_step.STEPS):
        ours = step.run(stash)
        stash_step.check_gradients(imbalance, ours, step.run(None))
        losses.append(float(ours[0]))
        step.advance()
    # A rank without rows has the same loss whoever got them.
    assert (len(set(losses)) > 1) == (imbalance != "idle_rank")
    # The newest stays where it is once a step has been seen.
    assert stash.stats().batches == SHAPE.layers * stash_step.STEPS - (stash_step.STEPS - 1)
    assert stash.is_idle


@pytest.mark.usefixtures("one_case")
def test_a_run_says_what_was_saved(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = stash_step.measure(2, ["balanced"])
    assert row.values == SHAPE.layers
    assert row.mode == "eager"
    assert "overflows 0" in row.stash
    stash_step.show([row])
    printed = capsys.readouterr().out
    header = next(line for line in printed.splitlines() if "quartiles" in line)
    assert header.index("ratio") < header.index("quartiles")


@pytest.fixture
def one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backstash.bench.timing.BATCH_S", 1e-6)
    monkeypatch.setattr(stash_step, "FACTORS", (4.0,))
    monkeypatch.setattr(stash_step, "IMBALANCES", {"balanced": IMBALANCES["balanced"]})
    monkeypatch.setattr(stash_step, "default_device", lambda: CPU)


def test_gradients_that_differ_in_a_bit_are_not_timed() -> None:
    with pytest.raises(RuntimeError, match="nothing is timed"):
        stash_step.check_gradients("a step", [torch.zeros(2)], [torch.ones(2)])
    with pytest.raises(RuntimeError, match="nothing is timed"):
        stash_step.check_gradients("a step", [torch.zeros(2)], [])


def test_the_peak_is_the_larger_of_backward_with_one_layer_whole_and_forward_with_two() -> None:
    layer = SHAPE.capacity(2.0) * sum(SHAPE.row_bytes)
    backward = stash_step.Peaks(forward=0, whole=5 * layer)
    assert backward.with_stash(SHAPE, 2.0, 7) == 5 * layer - (SHAPE.layers - 1) * layer + 7
    forward = stash_step.Peaks(forward=5 * layer, whole=5 * layer)
    assert forward.with_stash(SHAPE, 2.0, 7) == 5 * layer - (SHAPE.layers - 2) * layer + 7


@pytest.mark.usefixtures("one_case")
def test_rows_are_chosen_by_parts_of_their_names() -> None:
    with pytest.raises(ConfigError, match="capacity factor 4, balanced, eager"):
        stash_step.measure(2, ["captured"])
