"""A trained model writes the same text for the same seed, from any prompt."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from backstash.errors import CheckpointError, ConfigError
from backstash.train import metrics
from backstash.train.generate import GenerateConfig, choose, generate_from_run, generate_text
from backstash.train.loop import make_model
from backstash.train.tokenizer import ByteTokenizer
from train_cases import run, small_run


def write(folder: Path, **fields: Any) -> str:
    options: dict[str, Any] = {"run": folder, "device": "cpu", "tokens": 12}
    config = GenerateConfig(**(options | fields))
    return "".join(generate_from_run(config))


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    return run(small_run(tmp_path, steps=1)).folder.root


def test_a_run_writes_from_its_checkpoint(trained: Path) -> None:
    text = write(trained, prompt="def ")
    assert text.startswith("def ")
    assert len(text) > 4
    assert write(trained, prompt="def ") == text
    assert write(trained, prompt="def ", seed=1) != text


def test_a_prompt_may_be_longer_than_the_context(trained: Path) -> None:
    prompt = "x" * 50
    assert write(trained, prompt=prompt).startswith(prompt)


def test_characters_of_several_bytes_are_yielded_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = iter("é€𝄞a".encode())
    monkeypatch.setattr("backstash.train.generate.next_token", lambda *_: next(tokens))
    config = small_run(tmp_path)
    asked = GenerateConfig(prompt="p", tokens=10)
    pieces = list(generate_text(make_model(config), ByteTokenizer(), config, asked))
    assert pieces == ["p", "é", "€", "𝄞", "a"]


def test_writing_leaves_a_model_in_training(tmp_path: Path) -> None:
    config = small_run(tmp_path)
    model = make_model(config)
    list(generate_text(model, ByteTokenizer(), config, GenerateConfig(tokens=1)))
    assert model.training


def test_without_temperature_the_likeliest_is_taken() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0])
    config = GenerateConfig(temperature=0.0)
    assert choose(logits, config, torch.Generator()) == 1


def test_only_the_likeliest_few_are_drawn_as_often_as_they_are_likely() -> None:
    logits = torch.tensor([0.0, math.log(3.0), -100.0, -50.0])
    config = GenerateConfig(temperature=1.0, top_k=2)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor([choose(logits, config, generator) for _ in range(2000)])
    assert set(drawn.tolist()) == {0, 1}
    # Four standard deviations of a fair draw.
    assert drawn.double().mean().item() == pytest.approx(0.75, abs=4 * (0.75 * 0.25 / 2000) ** 0.5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("run", "runs/x"),
        ("prompt", ""),
        ("prompt", 3),
        ("tokens", 0),
        ("top_k", 0),
        ("seed", -1),
        ("temperature", -0.5),
        ("temperature", float("nan")),
        ("device", "gpu"),
    ],
)
def test_wrong_options_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        GenerateConfig(**{name: value})


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="--run folder"):
        write(tmp_path)
