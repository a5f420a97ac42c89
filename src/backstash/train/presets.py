"""Runs that have a name.  Each is a function, so that a variant is an ordinary call away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from backstash.errors import ConfigError
from backstash.train.config import ModelConfig, OptimizerConfig, TrainConfig


def demo() -> TrainConfig:
    """About two minutes on two CPU cores: long enough to see a model learn to write Python."""
    return TrainConfig(
        run=Path("runs/demo"),
        start="fresh",
        steps=160,
        batch=16,
        evaluate_every=40,
        save_every=40,
        account=True,
        preactivation="mxfp8",
        model=ModelConfig(layers=3, balance_speed=0.01),
        optimizer=OptimizerConfig(learning_rate=2e-3),
    )


def tiny() -> TrainConfig:
    """A few seconds anywhere: the smallest model that has every part."""
    return TrainConfig(
        run=Path("runs/tiny"),
        steps=8,
        batch=2,
        evaluate_every=4,
        evaluate_batches=1,
        save_every=4,
        log_every=2,
        model=ModelConfig(
            context=32,
            layers=2,
            hidden=32,
            heads=2,
            kv_heads=1,
            head_width=16,
            experts=4,
            expert_width=32,
            shared_width=32,
        ),
    )


def small() -> TrainConfig:
    """Some hours on a CPU, minutes on a GPU: a model that is no longer a toy."""
    return TrainConfig(
        run=Path("runs/small"),
        steps=5000,
        batch=32,
        dtype="bfloat16",
        preactivation="mxfp8",
        evaluate_every=250,
        save_every=250,
        model=ModelConfig(
            context=512,
            layers=8,
            hidden=512,
            heads=8,
            kv_heads=2,
            head_width=64,
            experts=32,
            top_k=4,
            expert_width=256,
            shared_width=256,
        ),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup=0.02),
    )


PRESETS: dict[str, Callable[[], TrainConfig]] = {"demo": demo, "small": small, "tiny": tiny}


def preset(name: str) -> TrainConfig:
    """Return the run with this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in PRESETS:
        raise ConfigError(
            f"preset has to be one of {', '.join(PRESETS)}, got {name!r}; pass one of them and "
            "override what should differ"
        )
    return PRESETS[name]()
