"""Small texts and runs that the tests of the trainer share."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from backstash.train.config import ModelConfig, TrainConfig
from backstash.train.session import Outcome, train


class Silent:
    """An output that remembers what it was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.records: list[dict[str, float]] = []
        self.is_closed = False

    def say(self, text: str) -> None:
        self.lines.append(text)

    def progress(self, record: Any) -> None:
        self.records.append(dict(record))

    def close(self) -> None:
        self.is_closed = True


def write_text(folder: Path, *, documents: int = 24) -> Path:
    """Write a folder of short documents that are easy to learn."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        lines = (f"def f{number}_{i}(x):\n    return x + {i}\n" for i in range(8))
        (folder / f"doc{number:02d}.txt").write_text("".join(lines), encoding="utf-8")
    return folder


def small_model(**fields: Any) -> ModelConfig:
    sizes: dict[str, Any] = {
        **{"context": 16, "layers": 2, "hidden": 16, "heads": 2, "kv_heads": 1, "head_width": 8},
        **{"experts": 4, "expert_width": 16, "balance_speed": 0.01, "balance_loss": 0.0},
    }
    return ModelConfig(**(sizes | fields))


def small_run(folder: Path, **fields: Any) -> TrainConfig:
    """A run of a second: four steps of a small model on short documents."""
    values: dict[str, Any] = {
        **{"run": folder / "run", "data": folder / "text", "steps": 4, "batch": 2},
        **{"evaluate_every": 2, "evaluate_batches": 1, "save_every": 2, "log_every": 1},
        "model": small_model(),
        "device": "cpu",
    }
    if not (folder / "text").exists():
        write_text(folder / "text")
    return TrainConfig(**(values | fields))


def run(config: TrainConfig) -> Outcome:
    return train(config, Silent())


def resumed(config: TrainConfig) -> TrainConfig:
    return dataclasses.replace(config, start="resume", stop_after=None)


def state_of(outcome: Outcome) -> dict[str, torch.Tensor]:
    """Every tensor a checkpoint of the run would hold, cloned."""
    return {name: t.clone() for name, t in outcome.trainer.checkpoint().tensors.items()}


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    differing = [name for name in wanted if not torch.equal(got[name], wanted[name])]
    assert not differing, differing


__all__ = [
    "Silent",
    "assert_same",
    "resumed",
    "run",
    "small_model",
    "small_run",
    "state_of",
    "write_text",
]
