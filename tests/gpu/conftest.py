"""What tests on a GPU ask for: memory as torch gives it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def plain_memory() -> Iterator[None]:
    """Fresh memory is not filled: a graph would hold it, and it is slow for gigabytes."""
    filled = torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore
    yield
    torch.utils.deterministic.fill_uninitialized_memory = filled  # pyright: ignore
    gc.collect()
    torch.cuda.empty_cache()
