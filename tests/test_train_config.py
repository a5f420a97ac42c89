"""A config is checked when it is made, says what to do, and survives being written down."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from backstash.errors import ConfigError
from backstash.formats import HIGH_PRECISION
from backstash.recipes import Operand, Phase, Role
from backstash.train.config import (
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    config_from_json,
    config_to_json,
)
from backstash.train.names import matmul_names

NAN, INFINITY = float("nan"), float("inf")

WRONG: list[tuple[Any, str, Any]] = [
    *((ModelConfig, name, value) for name in ("layers", "hidden") for value in (0, -1, 2.0, True)),
    *((ModelConfig, name, None) for name in ("vocabulary", "context", "experts", "top_k")),
    (ModelConfig, "expert_width", "128"),
    (ModelConfig, "shared_width", -1),
    (ModelConfig, "kv_heads", 3),
    (ModelConfig, "head_width", 7),
    (ModelConfig, "top_k", 9),
    *((ModelConfig, "rotary_base", value) for value in (1.0, NAN, INFINITY, "10000")),
    (ModelConfig, "balance_speed", -0.1),
    (ModelConfig, "balance_loss", NAN),
    *((OptimizerConfig, "learning_rate", value) for value in (0.0, -1.0, NAN, INFINITY, None)),
    (OptimizerConfig, "final_ratio", 1.5),
    (OptimizerConfig, "warmup", -0.1),
    *((OptimizerConfig, name, 1.0) for name in ("beta1", "beta2")),
    (OptimizerConfig, "epsilon", 0.0),
    (OptimizerConfig, "weight_decay", -1),
    (OptimizerConfig, "clip_norm", NAN),
    *((TrainConfig, name, 0) for name in ("steps", "batch", "accumulate", "evaluate_every")),
    *((TrainConfig, name, 0) for name in ("evaluate_batches", "save_every", "log_every")),
    (TrainConfig, "keep_checkpoints", 0),
    (TrainConfig, "stop_after", 0),
    (TrainConfig, "seed", -1),
    (TrainConfig, "seed", 2**63),
    *((TrainConfig, "held_out", value) for value in (0.0, 1.0, NAN)),
    (TrainConfig, "start", "again"),
    (TrainConfig, "dtype", "float16"),
    (TrainConfig, "recompute", "yes"),
    (TrainConfig, "recipe", "mxfp9"),
    (TrainConfig, "recipe", None),
    (TrainConfig, "preactivation", "float8_delayed"),
    *((TrainConfig, "keep_high_precision", value) for value in ("*", ["*"], (3,), ("head",))),
    *((TrainConfig, "keep_high_precision", (name,)) for name in ("layers.4.*", "*.shared.*")),
    *((TrainConfig, "device", value) for value in ("tpu", "cuda:x", "cpu:1", 0)),
    (TrainConfig, "run", "runs/x"),
    (TrainConfig, "data", "text"),
    (TrainConfig, "tokenizer", 3),
    (TrainConfig, "account", "yes"),
    (TrainConfig, "model", {}),
    (TrainConfig, "optimizer", None),
]


@pytest.mark.parametrize(
    ("kind", "name", "value"), WRONG, ids=[f"{k.__name__}.{n}={v!r}" for k, n, v in WRONG]
)
def test_a_wrong_value_is_refused_with_what_came_and_what_to_do(
    kind: Any, name: str, value: Any
) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**{name: value})
    message = str(caught.value)
    assert name in message
    assert repr(value) in message or str(value) in message
    assert "pass" in message or "wrap" in message or "must be one of" in message


def test_a_variant_is_checked_again() -> None:
    with pytest.raises(ConfigError, match="steps"):
        dataclasses.replace(TrainConfig(), steps=-3)


def test_configs_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().steps = 3  # type: ignore[misc]


def test_a_config_written_as_json_comes_back_equal() -> None:
    config = TrainConfig(
        run=Path("a/b"),
        data=Path("text"),
        model=ModelConfig(layers=7),
        stop_after=3,
        keep_high_precision=("layers.6.*", "*.qkv"),
    )
    written = json.loads(json.dumps(config_to_json(config)))
    assert config_from_json(written, TrainConfig) == config


@pytest.mark.parametrize("part", ["", "model", "optimizer"])
def test_an_unknown_key_is_refused_by_name(part: str) -> None:
    values = config_to_json(TrainConfig())
    (values[part] if part else values)["colour"] = "blue"
    with pytest.raises(ConfigError, match="colour"):
        config_from_json(values, TrainConfig)


def test_json_that_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigError, match="JSON object"):
        config_from_json([], TrainConfig)  # type: ignore[arg-type]


def test_the_recipe_keeps_preactivations_as_the_config_says() -> None:
    config = TrainConfig(recipe="mxfp8", preactivation="float8_current")
    assert config.formats.name == "mxfp8"
    assert config.formats.preactivation.name == "float8_current"


def test_matmuls_are_kept_in_high_precision_by_name() -> None:
    config = TrainConfig(keep_high_precision=("layers.0.*", "*.fc2"))
    for name in matmul_names(config.model.layers, is_shared=False):
        format = config.formats.format(Role(Operand.INPUT, Phase.FORWARD, "Linear", name))
        is_kept = name.startswith("layers.0.") or name.endswith("fc2")
        assert (format is HIGH_PRECISION) is is_kept


def test_a_step_learns_from_all_passes() -> None:
    config = TrainConfig(batch=3, accumulate=5, model=ModelConfig(context=7))
    assert config.step_tokens == 3 * 5 * 7
