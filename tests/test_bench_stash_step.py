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
    # Every layer computes in pages what it saves.
    assert stash.stats().claimed == SHAPE.layers * stash_step.STEPS
    assert stash.stats().batches == 0
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


@pytest.mark.parametrize("moment", stash_step.Peaks._fields)
def test_the_peak_is_the_largest_moment_without_what_is_in_pages(moment: str) -> None:
    rows = SHAPE.capacity(2.0)
    saved = SHAPE.layers * rows * 4 * (SHAPE.hidden + 2 * SHAPE.ffn)
    least = stash_step.Peaks(2 * saved, 2 * saved, 2 * saved - rows * SHAPE.preactivation_bytes)
    peaks = least._replace(**{moment: getattr(least, moment) + 3})
    assert peaks.with_stash(SHAPE, 2.0, 7) == saved + 3 + 7


@pytest.mark.gpu
def test_on_a_gpu_the_peaks_of_the_parts_are_those_of_the_step() -> None:
    step = stash_step.Step(SHAPE, 2.0, "balanced", torch.device("cuda"))
    step.run(None)
    peaks = stash_step._peaks_of(step, lambda: step.run(None))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step.run(None)
    assert peaks is not None
    assert max(peaks) == torch.cuda.max_memory_allocated() - before


@pytest.mark.usefixtures("one_case")
def test_rows_are_chosen_by_parts_of_their_names() -> None:
    with pytest.raises(ConfigError, match="capacity factor 4, balanced, eager"):
        stash_step.measure(2, ["captured"])
