"""Records reach their file whole, and a terminal gets a bar where a pipe gets lines."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch

from backstash.errors import CheckpointError
from backstash.train import metrics
from backstash.train.metrics import (
    MetricsLog,
    PlainOutput,
    RichOutput,
    StepMetrics,
    describe,
    open_output,
    peak_memory_bytes,
    read_metrics,
)

METRICS = StepMetrics(
    step=3,
    loss=2.5,
    grad_norm=1.25,
    learning_rate=0.001,
    tokens_per_s=1234.5,
    saved_bytes=2**20,
    peak_memory_bytes=2**30,
    expert_load_max=30,
    expert_load_mean=20.0,
)


@pytest.fixture
def log_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log without TensorBoard, which takes seconds to import."""
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    return tmp_path / "metrics.jsonl"


def write(path: Path, steps: list[int], *, last_step: int = 0) -> None:
    log = MetricsLog(path, path.parent / "tensorboard", last_step=last_step)
    for step in steps:
        log.write({"step": step, "loss": step / 2})
    log.close()


def test_each_step_is_a_line_with_every_measurement(log_path: Path) -> None:
    log = MetricsLog(log_path, log_path.parent / "tensorboard", last_step=0)
    log.write(METRICS.record())
    (line,) = log_path.read_text().splitlines()
    log.close()
    assert json.loads(line) == METRICS.record()
    wanted = {"loss", "grad_norm", "tokens_per_s", "saved_bytes", "peak_memory_bytes"}
    assert wanted | {"expert_load_max", "expert_load_mean"} <= METRICS.record().keys()


def test_a_resumed_log_forgets_the_steps_that_are_taken_again(log_path: Path) -> None:
    write(log_path, [1, 2, 3, 4])
    write(log_path, [3, 4], last_step=2)
    assert [r["step"] for r in read_metrics(log_path)] == [1, 2, 3, 4]


def test_a_new_log_is_empty(log_path: Path) -> None:
    write(log_path, [1, 2])
    write(log_path, [1])
    assert [r["step"] for r in read_metrics(log_path)] == [1]


def test_no_file_means_no_records(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("line", ['{"step": 1', "[]", '{"loss": 1}', '{"step": "x"}'])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n' + line + "\n")
    with pytest.raises(CheckpointError, match="line 2 of"):
        read_metrics(path)


@pytest.mark.parametrize("tail", ["", '{"step": 3, "lo', "\udc80\udcff"], ids=repr)
def test_a_last_line_that_was_cut_short_is_no_record(tmp_path: Path, tail: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n' + tail, errors="surrogateescape")
    assert [r["step"] for r in read_metrics(path)] == [1, 2]


def test_a_log_that_cannot_be_read_or_written_is_an_error_with_the_remedy(log_path: Path) -> None:
    log_path.mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        write(log_path, [1], last_step=1)
    with pytest.raises(CheckpointError, match=r"could not be written.*make room"):
        write(log_path, [1])


def test_a_full_disk_is_named_when_a_record_is_written(log_path: Path) -> None:
    log = MetricsLog(log_path, log_path.parent / "tensorboard", last_step=0)
    log._file.close()
    log._file = open("/dev/full", "w")  # noqa: SIM115
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl could not be written.*No space"):
        log.write({"step": 1})
    log.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tensorboard_gets_the_same_records(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", [1, 2])
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_plain_output_prints_every_few_steps_and_the_last() -> None:
    stream = io.StringIO()
    output = PlainOutput(steps=7, log_every=3, stream=stream)
    for step in range(1, 8):
        output.progress(METRICS.record() | {"step": step})
    output.progress({"step": 2, "held_out_loss": 3.0})
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["3/7", "6/7", "7/7", "2/7"]
    assert "held-out 3.000" in lines[-1]


def test_a_line_says_what_a_person_looks_at() -> None:
    line = describe(METRICS.record() | {"held_out_loss": 2.0})
    assert line == (
        "held-out 2.000  loss 2.500  grad 1.25  1,234 tokens/s  saved 1.0 MiB  expert load 1.50"
    )


def test_output_is_plain_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert isinstance(open_output(steps=3, log_every=1), PlainOutput)


def test_output_is_a_bar_where_there_is_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", stream)
    output = open_output(steps=3, log_every=1)
    assert isinstance(output, RichOutput)
    output.say("[not markup]")
    output.progress(METRICS.record() | {"held_out_loss": 2.0})
    output.close()
    assert "[not markup]" in stream.getvalue()
    assert "held-out 2.000" in stream.getvalue()


def test_this_process_has_held_some_memory() -> None:
    assert 2**20 < peak_memory_bytes(torch.device("cpu")) < 2**40
