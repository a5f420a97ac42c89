"""A pool is as large as its need and a margin, and forgets slowly."""

from __future__ import annotations

from typing import Any

import pytest

from backstash.errors import ConfigError
from backstash.stash import Sizing, pages_for


def test_a_maximum_decays_and_a_larger_one_takes_its_place() -> None:
    sizing = Sizing(decay=0.5)
    assert sizing.follow(8.0, 3.0) == 4.0
    assert sizing.follow(8.0, 6.0) == 6.0
    assert sizing.follow(8.0, 9.0) == 9.0


def test_pages_are_the_need_and_the_margin_up_to_the_limit() -> None:
    assert Sizing(margin=1.5).pages(10.1, 64) == 16
    assert Sizing(margin=1.5, most_bytes=640).pages(10.1, 64) == 10
    assert Sizing().pages(0, 64) == 0


@pytest.mark.parametrize(
    "options",
    [
        *[{"margin": 0.9}, {"decay": 1.1}, {"decay": -0.1}, {"most_bytes": -1}],
        *[{"margin": "2"}, {"margin": float("inf")}, {"decay": None}, {"most_bytes": 1e9}],
    ],
    ids=str,
)
def test_values_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Sizing(**options)  # pyright: ignore[reportArgumentType]


def test_each_buffer_fills_pages_of_its_own() -> None:
    assert pages_for([], 64) == 0
    assert pages_for([(0, 128), (1, 1), (64, 1), (65, 1), (10, 128)], 64) == 0 + 1 + 1 + 2 + 20
