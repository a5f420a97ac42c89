"""The names of the matmuls are those that the model's layers go by."""

from __future__ import annotations

import pytest
import torch

from backstash.errors import ConfigError
from backstash.formats import HIGH_PRECISION, Format
from backstash.recipes import Role, autocast, custom
from backstash.train.config import TrainConfig
from backstash.train.loop import make_model
from backstash.train.names import check_patterns, layer_name, matmul_names
from train_cases import small_model


@pytest.mark.parametrize("shared_width", [0, 8])
def test_they_are_those_that_a_recipe_is_asked_with(shared_width: int) -> None:
    config = TrainConfig(model=small_model(shared_width=shared_width))
    asked: list[str] = []

    def choose(role: Role) -> Format:
        asked.append(role.name)
        return HIGH_PRECISION

    with autocast(recipe=custom(choose)):
        make_model(config)(torch.zeros(1, 4, dtype=torch.int64))
    names = matmul_names(config.model.layers, is_shared=shared_width > 0)
    assert list(dict.fromkeys(asked)) == names
    assert names[0] == layer_name(0, "qkv")


@pytest.mark.parametrize("pattern", ["layers.0.qkv", "*.qkv", "layers.1.*", "*"])
def test_a_pattern_that_names_a_matmul_is_taken(pattern: str) -> None:
    check_patterns((pattern,), matmul_names(2, is_shared=False))


@pytest.mark.parametrize("pattern", ["qkv", "layers.2.*", "*.shared.*", "*.experts", "head", ""])
def test_a_pattern_that_names_none_is_refused_with_the_names(pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"names none; pass names from layers\.0\.qkv to layers"):
        check_patterns(("*.qkv", pattern), matmul_names(2, is_shared=False))
