"""A run learns, can be stopped anywhere, and goes on as if it had not been."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from backstash.errors import CheckpointError, ConfigError, DataError
from backstash.train import metrics, state
from backstash.train.config import OptimizerConfig
from backstash.train.loop import Trainer
from backstash.train.metrics import StepMetrics, read_metrics
from backstash.train.session import Ending, train
from backstash.train.state import newest_checkpoint, read_checkpoint
from test_train_tokenizer import write_tokenizer
from train_cases import Silent, assert_same, resumed, run, small_model, small_run, state_of


@pytest.fixture(autouse=True)
def without_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)


def test_a_run_leaves_its_files(tmp_path: Path) -> None:
    config = small_run(tmp_path)
    output = Silent()
    outcome = train(config, output)
    assert outcome.ending is Ending.FINISHED
    assert outcome.folder.read_config() == config
    assert newest_checkpoint(outcome.folder.checkpoints) is not None
    assert [r["step"] for r in outcome.records] == [0, 1, 2, 3, 4]
    assert [r["step"] for r in outcome.records if "held_out_loss" in r] == [0, 2, 4]
    assert output.records == outcome.records
    assert output.is_closed
    assert any("unigram" in line for line in output.lines)


def test_a_run_learns_its_text(tmp_path: Path) -> None:
    optimizer = OptimizerConfig(learning_rate=0.02)
    config = small_run(tmp_path, steps=40, batch=8, evaluate_every=40, optimizer=optimizer)
    outcome = run(config)
    losses = [r["held_out_loss"] for r in outcome.records if "held_out_loss" in r]
    assert losses[0] > 5.4
    assert losses[-1] < outcome.loss_unigram - 0.5


CASES: dict[str, dict[str, Any]] = {
    "mxfp8": {"recipe": "mxfp8", "preactivation": "mxfp8"},
    "delayed": {"recipe": "float8_delayed"},
    "bfloat16": {"recipe": "mxfp8", "dtype": "bfloat16", "accumulate": 2},
    "recompute": {"recipe": "float8_current", "recompute": "non_reentrant"},
    "reentrant": {"recipe": "high_precision", "recompute": "reentrant"},
}


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_a_resumed_run_is_bit_equal_to_one_that_was_not_stopped(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    model = small_model(shared_width=16, balance_loss=0.01)
    config = small_run(tmp_path, steps=5, save_every=100, model=model, **fields)
    whole = run(dataclasses.replace(config, run=tmp_path / "whole"))
    stopped = run(dataclasses.replace(config, stop_after=3))
    assert stopped.ending is Ending.STOPPED
    assert stopped.trainer.finished_steps == 3
    again = run(resumed(config))
    assert_same(state_of(again), state_of(whole))
    wanted = [(r["step"], r.get("loss"), r.get("held_out_loss")) for r in whole.records]
    assert [(r["step"], r.get("loss"), r.get("held_out_loss")) for r in again.records] == wanted


def test_a_run_that_died_between_checkpoints_takes_the_lost_steps_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_run(tmp_path, steps=6, save_every=2)
    whole = run(dataclasses.replace(config, run=tmp_path / "whole"))
    step = Trainer.step

    def die(self: Trainer) -> StepMetrics:
        if self.finished_steps == 3:
            raise MemoryError
        return step(self)

    monkeypatch.setattr(Trainer, "step", die)
    with pytest.raises(MemoryError):
        run(config)
    monkeypatch.setattr(Trainer, "step", step)
    again = run(resumed(config))
    assert_same(state_of(again), state_of(whole))
    assert [r["step"] for r in again.records] == list(range(7))


def test_ctrl_c_finishes_the_step_saves_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.step

    def interrupted(self: Trainer) -> StepMetrics:
        if self.finished_steps == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    monkeypatch.setattr(Trainer, "step", interrupted)
    outcome = run(small_run(tmp_path, save_every=100))
    assert outcome.ending is Ending.STOPPED
    assert read_checkpoint(outcome.folder.newest_checkpoint()).step == 2


def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_run(tmp_path, save_every=1)
    fsync = os.fsync
    calls: list[int] = []

    def fill(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(state.os, "fsync", fill)
    with pytest.raises(CheckpointError, match=r"No space left.*is whole"):
        run(config)
    monkeypatch.setattr(state.os, "fsync", fsync)
    assert run(resumed(config)).trainer.finished_steps == 4


def test_a_run_in_the_folder_is_not_overwritten(tmp_path: Path) -> None:
    config = small_run(tmp_path)
    first = run(config)
    with pytest.raises(ConfigError, match="--start fresh"):
        run(config)
    assert len(read_metrics(first.folder.metrics)) == 5


def test_a_fresh_run_has_nothing_of_the_one_before(tmp_path: Path) -> None:
    config = small_run(tmp_path)
    run(config)
    outcome = run(dataclasses.replace(config, start="fresh", steps=2))
    assert [r["step"] for r in outcome.records] == [0, 1, 2]


def test_a_mistake_costs_no_earlier_run(tmp_path: Path) -> None:
    config = small_run(tmp_path)
    first = run(config)
    wrong = dataclasses.replace(config, start="fresh", data=tmp_path / "missing")
    with pytest.raises(DataError):
        run(wrong)
    assert len(read_metrics(first.folder.metrics)) == 5
    assert first.folder.newest_checkpoint().exists()


def test_a_damaged_checkpoint_stops_the_resume_before_it_changes_anything(tmp_path: Path) -> None:
    config = small_run(tmp_path)
    outcome = run(dataclasses.replace(config, stop_after=3))
    path = outcome.folder.newest_checkpoint()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="delete it"):
        run(resumed(config))
    path.unlink()
    assert run(resumed(config)).trainer.finished_steps == 4


def test_a_run_can_be_made_longer(tmp_path: Path) -> None:
    config = small_run(tmp_path)
    run(config)
    longer = run(dataclasses.replace(resumed(config), steps=6))
    assert [r["step"] for r in longer.records] == list(range(7))


def test_a_run_cannot_be_made_shorter_than_it_is(tmp_path: Path) -> None:
    config = small_run(tmp_path)
    before = run(config).folder.config.read_text()
    with pytest.raises(ConfigError, match="steps has to be at least 4, which the run has finished"):
        run(dataclasses.replace(resumed(config), steps=3))
    assert (config.run / "config.json").read_text() == before


def test_a_tokenizer_larger_than_the_model_is_refused_with_the_size(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json", ["?", *(f"w{i}" for i in range(20))])
    config = small_run(tmp_path, tokenizer=path, model=small_model(vocabulary=16))
    with pytest.raises(ConfigError, match=r"--model.vocabulary 21"):
        run(config)


def test_a_run_with_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    words = ["?", "def", "return", "x", "+", "(", ")", ":"]
    path = write_tokenizer(tmp_path / "tokenizer.json", words)
    config = small_run(tmp_path, tokenizer=path, model=small_model(vocabulary=8))
    assert run(config).ending is Ending.FINISHED
