"""Every recipe is trained from the same seeds as high precision, and compared seed by seed."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from backstash import bench
from backstash.bench import recipes
from backstash.bench.recipes import Run
from backstash.errors import ConfigError
from backstash.recipes import recipe_names
from backstash.train import Ending, NonFiniteError, preset
from train_cases import small_run

CONFIG = recipes.demo("high_precision", 0, 300)


def of(recipe: str, seed: int, loss: float | None, **changes: Any) -> Run:
    made = Run(
        recipe=recipe, seed=seed, loss_first=5.5, loss_last=loss, step_ms=10.0, saved_bytes=2 << 20
    )
    return dataclasses.replace(made, **changes)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two steps of a small model for two recipes and two seeds."""

    def config(recipe: str, seed: int, steps: int) -> Any:
        return small_run(tmp_path, recipe=recipe, seed=seed, steps=steps, evaluate_every=steps)

    monkeypatch.setattr(recipes, "demo", config)
    monkeypatch.setattr(recipes, "STEPS", 2)
    monkeypatch.setattr(recipes, "SEEDS", (0, 5))
    monkeypatch.setattr(recipes, "recipe_names", lambda: ("mxfp8", "high_precision"))


@pytest.mark.usefixtures("small")
def test_a_run_prints_the_gap_first_and_appends_a_line_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["recipes", "--results", str(tmp_path / "results")]) == 0
    text = (tmp_path / "results" / "recipes.jsonl").read_text()
    quantized, exact = (json.loads(line) for line in text.splitlines())
    printed = capsys.readouterr().out
    assert [line.split(":")[0] for line in printed.splitlines()[:4]] == [
        f"{name}, seed {seed}" for name in ("mxfp8", "high_precision") for seed in (0, 5)
    ]
    header = next(line for line in printed.splitlines() if "saved MB" in line)
    assert header.split()[1] == "gap"
    assert (quantized["recipe"], exact["recipe"]) == ("mxfp8", "high_precision")
    assert (exact["gap"], exact["gaps"]) == (0.0, [0.0, 0.0])
    assert quantized["gap"] == statistics.fmean(
        mine - other for mine, other in zip(quantized["losses"], exact["losses"], strict=True)
    )
    assert quantized["noise"] == exact["noise"] == exact["spread"]
    assert quantized["losses_first"] != quantized["losses"]
    assert quantized["seeds"] == [0, 5]
    assert quantized["steps"] == 2


@pytest.mark.usefixtures("small")
def test_jobs_change_no_loss_and_the_order_of_no_row(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = recipes.measure(1), recipes.measure(2)
    for mine, other in zip(one, two, strict=True):
        assert (mine.recipe, mine.losses) == (other.recipe, other.losses)
        assert (mine.jobs, other.jobs) == (1, 2)


def test_every_recipe_is_trained_as_the_demo_and_only_the_recipe_differs() -> None:
    configs = [recipes.demo(name, 7, recipes.STEPS) for name in recipe_names()]
    assert recipes.STEPS == 300
    assert len(recipes.SEEDS) == 3
    for config, name in zip(configs, recipe_names(), strict=True):
        assert config.model == preset("demo").model
        assert config.optimizer == preset("demo").optimizer
        assert config == dataclasses.replace(configs[0], recipe=name)
        assert (config.steps, config.seed) == (300, 7)


def test_gap_spread_and_noise_are_those_of_the_seeds() -> None:
    runs = [of("high_precision", s, loss) for s, loss in enumerate([2.0, 2.2, 2.1])]
    runs += [of("mxfp8", s, loss, step_ms=10.0 * s) for s, loss in enumerate([2.1, 2.1, 2.2])]
    _, row = recipes.rows(runs, CONFIG, 3)
    assert row.gaps == pytest.approx([0.1, -0.1, 0.1])
    assert math.isclose(row.gap or 0, 0.1 / 3)
    assert row.noise == statistics.stdev([2.0, 2.2, 2.1])
    assert row.spread == statistics.stdev([2.1, 2.1, 2.2])
    assert (row.step_ms, row.saved_bytes, row.jobs) == (10.0, 2 << 20, 3)


@pytest.mark.parametrize(
    ("losses", "is_within"), [([2.05, 2.25], True), ([2.3, 2.4], False), ([1.8, 1.9], False)]
)
def test_a_gap_is_within_the_noise_or_not(losses: list[float], is_within: bool) -> None:
    runs = [of("high_precision", s, loss) for s, loss in enumerate([2.0, 2.2])]
    runs += [of("mxfp8", s, loss) for s, loss in enumerate(losses)]
    assert recipes.rows(runs, CONFIG, 1)[1].is_within_noise is is_within


def test_a_recipe_that_diverged_has_no_figures_and_is_shown_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = [of("high_precision", s, 2.0 + s) for s in range(2)]
    runs += [of("nvfp4", 0, 2.0), of("nvfp4", 1, None, step_ms=None, saved_bytes=None)]
    exact, row = recipes.rows(runs, CONFIG, 1)
    assert (row.mean, row.gap, row.spread, row.is_within_noise) == (None, None, None, None)
    assert (row.gaps, row.step_ms) == ([0.0, None], 10.0)
    recipes.show([exact, row])
    assert any("nvfp4" in line and " - " in line for line in capsys.readouterr().out.splitlines())


def test_one_seed_has_no_noise() -> None:
    row = recipes.rows([of("high_precision", 0, 2.0)], CONFIG, 1)[0]
    assert (row.noise, row.spread, row.gap, row.is_within_noise) == (None, None, 0.0, None)


def test_a_loss_that_is_not_a_number_is_a_run_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def diverge(config: Any, output: Any) -> Any:
        raise NonFiniteError("step 3 needs a finite loss")

    monkeypatch.setattr(recipes, "train", diverge)
    made = recipes.run(CONFIG)
    assert (made.recipe, made.loss_first, made.loss_last) == ("high_precision", None, None)


def test_an_interrupted_run_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped:
        ending, records = Ending.STOPPED, [{"step": 0, "held_out_loss": 5.0}]

    monkeypatch.setattr(recipes, "train", lambda config, output: Stopped())
    with pytest.raises(KeyboardInterrupt):
        recipes.run(CONFIG)


@pytest.mark.parametrize(
    ("case", "jobs", "message"),
    [
        ("saving", 2, "leave --jobs out"),
        ("recipes", 0, "1 to 256 jobs, got 0"),
        ("recipes", 999, "1 to 256 jobs, got 999"),
    ],
)
def test_jobs_that_mean_nothing_are_refused(case: str, jobs: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench.Options(case, jobs=jobs)
