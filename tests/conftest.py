"""Every test starts from the same random state, in memory that is full of NaN.

Fresh memory from ``torch.empty`` is filled with NaN (integers: their largest value), so
that reading a byte nobody wrote shows up as a wrong result instead of a lucky zero.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

# cuBLAS reads this when it starts; deterministic mode refuses matmuls on a GPU without it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# One thread a worker: several workers share the cores, and results do not depend on the split.
torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests in Triton's interpreter to the runs that it was started for."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    elsewhere = [item for item in items if item.get_closest_marker("interpreted")]
    if elsewhere:
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = [item for item in items if not item.get_closest_marker("interpreted")]


@pytest.fixture(autouse=True)
def fresh_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def same_random_state() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def same_draws(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stochastic rounding draws the same for the same place, so that results can be compared.

    A test that is about the draws themselves has the marker ``fresh_draws``.
    """
    if "fresh_draws" not in request.keywords:

        def draw_seed(device: torch.device) -> torch.Tensor:
            return torch.arange(1, 3, device=device)

        monkeypatch.setattr("backstash.kernels.draw_seed", draw_seed)
