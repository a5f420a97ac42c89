"""What each recipe costs in held-out loss, beside high precision: ``backstash bench recipes``.

The demo's model is trained with every recipe from the same seeds, on the same text.  A seed
decides the first weights and the order of the text, so *gap* is taken seed by seed: the loss
with a recipe less the loss in high precision.  *Noise* is what the seed alone does: the standard
deviation of the losses in high precision.  A gap within the noise cannot be told from having
started with another seed.

A recipe that diverges has no loss, and none of the figures that would be made of it.  A training
of this size waits for the host, so several can run at once (``--jobs``); that changes their time
and no loss on a CPU.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from backstash.bench.record import Result
from backstash.device import device_name
from backstash.recipes import recipe_names
from backstash.train import Ending, NonFiniteError, TrainConfig, preset, train
from backstash.train.loop import open_device
from backstash.train.ranks import Silence

STEPS = 300
SEEDS = (0, 1, 2)
BASELINE = "high_precision"
EVALUATE_BATCHES = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One training: the losses on held-out text, ``None`` where it diverged; medians of steps."""

    recipe: str
    seed: int
    loss_first: float | None
    loss_last: float | None
    step_ms: float | None
    saved_bytes: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeRow(Result):
    """One recipe; losses are nats a token of held-out text, in the order of the seeds.

    ``spread`` is the standard deviation over the seeds, ``noise`` that of high precision, and
    ``step_ms`` the median of a step while ``jobs`` trainings ran at once.
    """

    recipe: str
    device: str
    jobs: int
    steps: int
    seeds: Sequence[int]
    dtype: str
    losses_first: Sequence[float | None]
    losses: Sequence[float | None]
    mean: float | None
    spread: float | None
    gaps: Sequence[float | None]
    gap: float | None
    noise: float | None
    step_ms: float | None
    saved_bytes: int | None

    @property
    def is_within_noise(self) -> bool | None:
        """Whether the gap is no larger than the noise; ``None`` where one of them is not known."""
        if self.gap is None or self.noise is None:
            return None
        return abs(self.gap) <= self.noise


def demo(recipe: str, seed: int, steps: int) -> TrainConfig:
    """The demo's training with another recipe, which is all that differs.

    Pre-activations stay in high precision: what they cost is no matter of the recipe.
    """
    return dataclasses.replace(
        preset("demo"),
        recipe=recipe,
        seed=seed,
        steps=steps,
        preactivation="high_precision",
        evaluate_every=steps,
        evaluate_batches=EVALUATE_BATCHES,
        save_every=steps,
        account=False,
    )


def measure(jobs: int) -> list[RecipeRow]:
    """Train every recipe from every seed, ``jobs`` at once, and compare."""
    configs = [demo(name, seed, STEPS) for name in recipe_names() for seed in SEEDS]
    return rows(list(run_all(configs, jobs)), configs[0], jobs)


def run_all(configs: Sequence[TrainConfig], jobs: int) -> Iterator[Run]:
    """Train each, ``jobs`` at once, and say so as each is done; in the order of ``configs``."""
    with tempfile.TemporaryDirectory() as folder:
        tasks = [
            dataclasses.replace(config, run=Path(folder) / str(i), start="new")
            for i, config in enumerate(configs)
        ]
        if jobs == 1:
            yield from map(_said, map(run, tasks))
            return
        context = multiprocessing.get_context("spawn")  # a fork would share a GPU's context
        threads = max(1, (os.cpu_count() or 1) // jobs)
        with concurrent.futures.ProcessPoolExecutor(
            jobs, context, torch.set_num_threads, (threads,)
        ) as pool:
            futures = [pool.submit(run, task) for task in tasks]
            for future in concurrent.futures.as_completed(futures):
                _said(future.result())
            yield from (future.result() for future in futures)


def run(config: TrainConfig) -> Run:
    """Train once."""
    try:
        outcome = train(config, Silence())
        records = outcome.records
    except NonFiniteError:
        outcome, records = None, []
    if outcome is not None and outcome.ending is Ending.STOPPED:
        raise KeyboardInterrupt  # the trainer took it as a request to stop after a step
    evaluated = [record["held_out_loss"] for record in records if "held_out_loss" in record]
    steps = [record for record in records if "loss" in record]
    step_ms = [1000 * config.step_tokens / record["tokens_per_s"] for record in steps]
    return Run(
        recipe=config.recipe,
        seed=config.seed,
        loss_first=evaluated[0] if evaluated else None,
        loss_last=evaluated[-1] if evaluated else None,
        step_ms=statistics.median(step_ms) if step_ms else None,
        saved_bytes=int(steps[-1]["saved_bytes"]) if steps else None,
    )


def rows(runs: Sequence[Run], config: TrainConfig, jobs: int) -> list[RecipeRow]:
    """Compare the runs with those in high precision, which must be among them."""
    seeds = tuple(sorted({run.seed for run in runs}))
    by_seed = {(run.recipe, run.seed): run for run in runs}
    names = list(dict.fromkeys(run.recipe for run in runs))
    baseline = [by_seed[BASELINE, seed].loss_last for seed in seeds]
    device = device_name(open_device(config.device))
    return [
        _row([by_seed[name, seed] for seed in seeds], baseline, config, device=device, jobs=jobs)
        for name in names
    ]


def _row(
    runs: Sequence[Run],
    baseline: Sequence[float | None],
    config: TrainConfig,
    *,
    device: str,
    jobs: int,
) -> RecipeRow:
    losses = [run.loss_last for run in runs]
    gaps = [
        None if mine is None or other is None else mine - other
        for mine, other in zip(losses, baseline, strict=True)
    ]
    times = _known(run.step_ms for run in runs)
    saved = _known(run.saved_bytes for run in runs)
    return RecipeRow(
        case="recipes",
        what=f"{runs[0].recipe}, {config.steps} steps of the demo, {len(runs)} seeds",
        recipe=runs[0].recipe,
        device=device,
        jobs=jobs,
        steps=config.steps,
        seeds=[run.seed for run in runs],
        dtype=config.dtype,
        losses_first=[run.loss_first for run in runs],
        losses=losses,
        mean=_over_all(losses, statistics.fmean),
        spread=_over_all(losses, statistics.stdev, 2),
        gaps=gaps,
        gap=_over_all(gaps, statistics.fmean),
        noise=_over_all(baseline, statistics.stdev, 2),
        step_ms=statistics.median(times) if times else None,
        saved_bytes=int(saved[0]) if saved else None,
    )


def show(rows: Sequence[RecipeRow]) -> None:
    """Print the table, the gap first."""
    first = rows[0]
    noise = "not known" if first.noise is None else f"{first.noise:.4f}"
    table = Table(
        title=f"held-out loss after {first.steps} steps of the demo, {first.dtype}, on "
        f"{first.device}",
        caption=f"seeds {', '.join(map(str, first.seeds))}; noise of the seed {noise}; "
        f"{first.jobs} trainings at once",
    )
    for header in ("gap", "within\nnoise", "loss", "spread", "ms a step", "saved MB"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("recipe")
    for row in rows:
        within = {None: "-", True: "yes", False: "no"}[row.is_within_noise]
        table.add_row(
            f"[bold]{_text(row.gap, '+.4f')}[/bold]",
            "-" if row.recipe == BASELINE else within,
            _text(row.mean, ".4f"),
            _text(row.spread, ".4f"),
            _text(row.step_ms, ".1f"),
            _text(row.saved_bytes and row.saved_bytes / 1e6, ".2f"),
            row.recipe,
        )
    Console().print(table)


def _said(run: Run) -> Run:
    losses = f"{_text(run.loss_first, '.4f')} -> {_text(run.loss_last, '.4f')}"
    print(f"{run.recipe}, seed {run.seed}: {losses}, {_text(run.step_ms, '.1f')} ms", flush=True)
    return run


def _text(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _over_all(
    values: Sequence[float | None], figure: Callable[[list[float]], float], least: int = 1
) -> float | None:
    """A figure over all the values; none where one is missing, or they are too few."""
    known = _known(values)
    return figure(known) if len(known) == len(values) >= least else None
