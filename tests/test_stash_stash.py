"""A stash and what surrounds it is made with things that mean something, or not at all."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from backstash.errors import ConfigError
from backstash.stash import CapturedStep, Policy, Stash, Tail, Take
from stash_cases import pool, stash

BAD = {
    "a policy by name": ({"policy": "spill"}, r"policy must be of Policy, .*Policy\.SPILL, "),
    "another enum": ({"take": Tail.ZEROS}, r"take must be of Take, .*pass Take\.MARKED, Take\.ALL"),
    "a tail by name": ({"tail": "zeros"}, r"tail must be of Tail, got 'zeros'; pass Tail\."),
    "a number of batches below zero": ({"ahead": -1}, "ahead must be a whole number of at least 0"),
    "half a batch": ({"ahead": 1.5}, "ahead must be a whole number .* it is a number of batches"),
    "a format by name": ({"compress": "mxfp8"}, "got 'mxfp8'; pass compress=MXFP8"),
}


@pytest.mark.parametrize(("options", "words"), BAD.values(), ids=BAD)
def test_an_option_that_means_nothing_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Stash(pool(), **options)


def test_each_option_is_taken_as_it_was_given() -> None:
    kept = Stash(pool(), policy=Policy.WAIT, take=Take.ALL, tail=Tail.ZEROS, ahead=0)
    assert (kept.policy, kept.take, kept.tail) == (Policy.WAIT, Take.ALL, Tail.ZEROS)


def test_a_number_of_bytes_is_no_pool() -> None:
    with pytest.raises(ConfigError, match=r"pool must be of PagePool, got 4096; make one with"):
        Stash(4096)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("modules", [nn.Linear(1, 1), [nn.Linear(1, 1).weight]], ids=type)
def test_a_captured_step_needs_a_list_of_modules(modules: Any) -> None:
    with pytest.raises(ConfigError, match=r"(?s)modules.* give a list .* \[model\]"):
        CapturedStep(lambda: None, stash(), modules)


def test_a_captured_step_needs_a_stash() -> None:
    with pytest.raises(ConfigError, match=r"stash must be of Stash, .* the one that the step"):
        CapturedStep(lambda: None, pool(), [])  # pyright: ignore[reportArgumentType]
