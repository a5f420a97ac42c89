"""The command line: what it accepts, what it refuses, and with which status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from backstash import cli, device
from backstash.errors import CheckpointError
from backstash.recipes import recipe_names
from backstash.train import metrics
from backstash.train.config import config_to_json
from backstash.train.folder import RunFolder
from backstash.train.metrics import read_metrics
from train_cases import write_text

SIZES = {"context": 16, "layers": 1, "hidden": 16, "heads": 2, "kv-heads": 1, "head-width": 8}
SIZES |= {"experts": 4, "expert-width": 16}
MODEL = [*(f"--model.{k}={v}" for k, v in SIZES.items()), "--device=cpu", "--batch=2"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with some text in it, without TensorBoard, which takes seconds to import."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    write_text(tmp_path / "text")


def backstash(*words: str) -> int:
    """Run a command as its process would, and return the status."""
    try:
        return cli.main(words)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 1


def train(*words: str) -> int:
    return backstash("train", "--data", "text", "--run", "run", "--steps", "3", *MODEL, *words)


def test_train_prints_plain_lines_and_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert train() == 0
    out = capsys.readouterr().out
    assert "unigram entropy" in out
    assert "step     3/3  held-out" in out
    assert "\x1b" not in out
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["recipe"] == "mxfp8"


def test_an_account_ends_in_a_table_and_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--account", "--preactivation", "mxfp8") == 0
    out = capsys.readouterr().out
    assert "saved for backward, plain PyTorch" in out
    assert out.rstrip().endswith("index.html")
    page = Path(out.split()[-1])
    assert page == Path("run/index.html").resolve()
    assert "<svg" in page.read_text()
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["bit_equal_under_hooks"] is True
    assert summary["saved_bytes"] < summary["saved_bytes_high_precision"]


def test_options_override_the_preset() -> None:
    assert backstash("train", "--preset", "tiny", "--data", "text", "--steps=1", *MODEL) == 0
    config = RunFolder(Path("runs/tiny")).read_config()
    assert (config.steps, config.model.layers, config.model.shared_width) == (1, 1, 32)


def test_a_stopped_run_is_resumed_with_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--stop-after", "2") == 0
    assert "backstash train --resume run" in capsys.readouterr().out
    assert backstash("train", "--resume", "run") == 0
    assert [r["step"] for r in read_metrics(Path("run/metrics.jsonl"))] == [0, 1, 2, 3]


def test_matmuls_are_kept_in_high_precision_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    kept = ("--keep-high-precision", "layers.0.qkv", "*.fc2")
    assert train("--stop-after", "2", *kept) == 0
    assert RunFolder(Path("run")).read_config().keep_high_precision == kept[1:]
    assert "recipe mxfp8 except for layers.0.qkv, *.fc2" in capsys.readouterr().out
    assert backstash("train", "--resume", "run") == 0
    assert train("--start", "fresh", "--keep-high-precision", "head") == 2
    assert "'head' names none; pass names from layers.0.qkv" in capsys.readouterr().err


def test_a_run_from_before_an_option_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(config: Any) -> dict[str, Any]:
        values = config_to_json(config)
        del values["keep_high_precision"]
        return values

    with monkeypatch.context() as older:
        older.setattr("backstash.train.loop.config_to_json", without)
        older.setattr("backstash.train.folder.config_to_json", without)
        assert train("--stop-after", "2") == 0
    assert backstash("train", "--resume", "run") == 0


def test_resumed_options_may_not_change_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--stop-after", "2") == 0
    assert backstash("train", "--resume", "run", "--seed", "3") == 1
    assert "seed was 0 and is 3" in capsys.readouterr().err


def test_generate_writes_from_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert train() == 0
    capsys.readouterr()
    words = ("--run", "run", "--prompt", "def f", "--tokens", "5", "--device", "cpu")
    assert backstash("generate", *words) == 0
    assert capsys.readouterr().out.startswith("def f")


def test_estimate_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert backstash("estimate", "--preset", "small", "--model.layers", "100") == 0
    out = capsys.readouterr().out
    assert "saved for backward" in out
    assert "optimizer" in out
    assert not Path("runs").exists()


def test_estimate_refuses_a_stash_that_would_take_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert backstash("estimate", "--preset", "tiny", "--stash") != 0
    assert "pass a smaller --stash-page-bytes, or leave --stash out" in capsys.readouterr().err


def test_check_says_what_each_format_runs_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert backstash("check") == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("torch", *recipe_names()))
    assert "native" not in out


def test_check_names_what_multiplies_on_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "default_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(device, "describe", lambda: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert backstash("check") == 0
    recipes = capsys.readouterr().out.split("recipe    ")
    for name in ("float8_current", "float8_delayed", "float8_rowwise"):
        (text,) = [text for text in recipes if text.startswith(name)]
        assert "one weight and groups, all matmuls: native: float8" in text


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert backstash("--version") == 0
    assert capsys.readouterr().out == f"backstash {device.installed_version()}\n"
    assert backstash("check") == 0
    assert f"backstash {device.installed_version()}\n" in capsys.readouterr().out


def test_bench_lists_its_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert backstash("bench") == 0
    assert "saving" in capsys.readouterr().out


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert backstash(command, "--help") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "usage" in out
    described = (cli.COMMANDS[command].__doc__ or "").split(".")[0]
    assert described in out or command == "bench"  # which says what each case measures


def test_the_overview_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert backstash("--help") == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS)
    assert backstash() == 2
    # A new command is a decision: this list is changed with it.
    assert list(cli.COMMANDS) == ["train", "generate", "estimate", "check", "bench"]


WRONG = {
    "no such command": (["trian"], "trian"),
    "unknown option": (["train", "--colour", "blue"], "colour"),
    "unknown nested option": (["train", "--model.colour", "1"], "colour"),
    "unknown preset": (["train", "--preset", "huge"], "huge"),
    "value out of range": (["train", "--steps", "0"], "steps has to be"),
    "value of another type": (["train", "--steps", "many"], "many"),
    "unknown recipe": (["train", "--recipe", "mxfp9"], "mxfp9"),
    "preset and resume": (["train", "--preset", "tiny", "--resume", "run"], "run"),
    "no such GPU": (["train", "--device", "cuda:99"], "--device auto"),
    "no data": (["train", "--data", "missing"], "--data"),
    "options of check": (["check", "--fast"], "takes no options"),
    "wrong temperature": (["generate", "--temperature", "-1"], "temperature"),
}


@pytest.mark.parametrize(("words", "named"), WRONG.values(), ids=WRONG)
def test_a_mistake_is_status_2_and_one_message(
    words: list[str], named: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train("--stop-after", "1") == 0
    capfd.readouterr()
    assert backstash(*words) == 2
    captured = capfd.readouterr()
    assert named in captured.err + captured.out
    assert "Traceback" not in captured.err


def test_what_fails_later_is_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert backstash("generate", "--run", "missing") == 1
    assert "--run folder" in capsys.readouterr().err

    def fail(words: object) -> int:
        raise CheckpointError("no room")

    monkeypatch.setitem(cli.COMMANDS, "check", fail)
    assert backstash("check") == 1


def test_ctrl_c_before_the_first_step_is_status_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(words: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "check", interrupt)
    assert backstash("check") == 130
    assert "interrupted" in capsys.readouterr().err


def test_ctrl_c_leaves_a_run_that_can_be_resumed() -> None:
    command = [sys.executable, "-m", "backstash"]
    words = ["train", "--data", "text", "--run", "run", "--steps", "100000", *MODEL]
    source = str(Path(cli.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, *words], stdout=subprocess.PIPE, env=environment) as process:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not Path("run/metrics.jsonl").exists():
            time.sleep(0.05)
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"backstash train --resume run" in out
    step = len(read_metrics(Path("run/metrics.jsonl"))) - 1
    assert RunFolder(Path("run")).newest_checkpoint().stem == f"step-{step:08d}"
    resumed = [*command, "train", "--resume", "run", "--stop-after", str(step + 1)]
    subprocess.run(resumed, check=True, env=environment, stdout=subprocess.DEVNULL, timeout=60)


def test_mistakes_are_the_same_without_asserts() -> None:
    source = str(Path(cli.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-O", "-m", "backstash", "train", "--steps", "-1"],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "steps has to be" in done.stderr + done.stdout
