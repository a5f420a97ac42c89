"""The names by which recipes know the matmuls of the model's layers.

A recipe keeps matmuls in high precision by patterns of their names.  A pattern that names
nothing is a mistake that would change nothing and say nothing, so it is refused.
"""

from __future__ import annotations

import fnmatch
from typing import Any

from backstash.errors import ConfigError


def layer_name(layer: int, part: str) -> str:
    """Return the name of a part of a layer."""
    return f"layers.{layer}.{part}"


def matmul_names(layers: int, *, is_shared: bool) -> list[str]:
    """Return the names of all matmuls of so many layers, with or without a shared expert."""
    parts = ["qkv", "projection", "moe.experts.fc1", "moe.experts.fc2"]
    parts += ["moe.shared.fc1", "moe.shared.fc2"] if is_shared else []
    return [layer_name(layer, part) for layer in range(layers) for part in parts]


def check_patterns(patterns: Any, names: list[str]) -> None:
    """Raise :class:`ConfigError` unless these are patterns, each of which names a matmul."""
    if not isinstance(patterns, tuple):
        raise ConfigError(
            f"keep_high_precision has to be a tuple of patterns, got {patterns!r}; pass for "
            "example ('*.qkv',)"
        )
    for pattern in patterns:
        is_text = isinstance(pattern, str)
        if not is_text or not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"keep_high_precision has to name matmuls of the model, got {patterns!r}, of which "
                f"{pattern!r} names none; pass names from {names[0]} to {names[-1]}, or patterns "
                "such as '*.qkv' and 'layers.0.*'"
            )
