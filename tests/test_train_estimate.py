"""Formulas say what a real step keeps, to the byte."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from backstash.recipes import autocast
from backstash.saving import Meter, saving
from backstash.train.config import TrainConfig
from backstash.train.estimate import estimate
from backstash.train.loop import Trainer, make_model
from backstash.train.session import open_corpus
from train_cases import small_model, small_run

RECIPES = ("high_precision", "mxfp8", "float8_current", "float8_delayed")
SIZES: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared": {"shared_width": 24},
    "balanced": {"balance_loss": 0.1},
    "one expert a token": {"top_k": 1, "experts": 5},
    "no grouped heads": {"heads": 3, "kv_heads": 3, "hidden": 20},
    "wide": {"hidden": 40, "expert_width": 72, "layers": 1, "context": 33},
}


def kept(config: TrainConfig) -> int:
    model, meter = make_model(config), Meter()
    tokens = torch.randint(config.model.vocabulary, (config.batch, config.model.context + 1))
    with saving(meter), autocast(recipe=config.formats):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    count = meter.bytes
    del loss
    return count


@pytest.mark.parametrize(
    ("recipe", "preactivation", "dtype"),
    list(itertools.product(RECIPES, ("high_precision", "mxfp8"), ("float32", "bfloat16"))),
)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_saved_bytes_are_those_that_the_meter_counts(
    recipe: str, preactivation: Any, dtype: Any, sizes: dict[str, Any]
) -> None:
    model = small_model(**sizes)
    config = TrainConfig(
        batch=3, recipe=recipe, preactivation=preactivation, dtype=dtype, model=model
    )
    assert estimate(config).saved_bytes == kept(config)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "patterns", [("layers.0.*",), ("*.moe.experts.*",), ("*.projection", "*.shared.fc1")], ids=str
)
def test_what_stays_in_high_precision_by_name_is_counted(
    recipe: str, patterns: tuple[str, ...]
) -> None:
    config = TrainConfig(
        batch=3,
        recipe=recipe,
        preactivation="mxfp8",
        keep_high_precision=patterns,
        model=small_model(shared_width=24, layers=2),
    )
    assert estimate(config).saved_bytes == kept(config)


def test_reentrant_recomputation_keeps_the_inputs_of_layers() -> None:
    config = TrainConfig(batch=2, recompute="reentrant", model=small_model())
    assert estimate(config).saved_bytes == kept(config)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_and_their_bytes_are_those_of_the_model(
    dtype: Any, sizes: dict[str, Any]
) -> None:
    config = TrainConfig(dtype=dtype, model=small_model(**sizes))
    numbers = estimate(config)
    parameters = list(make_model(config).parameters())
    assert numbers.parameters == sum(p.numel() for p in parameters)
    assert numbers.weight_bytes == sum(p.nbytes for p in parameters)
    assert numbers.active_parameters <= numbers.parameters


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_optimizer_bytes_are_those_of_its_state(tmp_path: Path, dtype: Any) -> None:
    config = small_run(tmp_path, dtype=dtype)
    trainer = Trainer(config, open_corpus(config))
    trainer.step()
    state = trainer.checkpoint().part("optimizer")
    held = sum(t.nbytes for name, t in state.items() if not name.startswith("step."))
    assert estimate(config).optimizer_bytes == held
