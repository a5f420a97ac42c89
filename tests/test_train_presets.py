"""Presets are runs with a name."""

from __future__ import annotations

import pytest

from backstash.errors import ConfigError
from backstash.train.peak import peak_bytes
from backstash.train.presets import PRESETS, preset


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_a_folder_of_its_own_and_an_estimate(name: str) -> None:
    config = preset(name)
    assert config.run.name == name
    assert peak_bytes(config) > 0


def test_the_demo_starts_fresh_and_gives_an_account() -> None:
    config = preset("demo")
    assert config.start == "fresh"
    assert config.account
    assert config.recipe == "mxfp8"


def test_an_unknown_preset_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match=r"demo.*huge"):
        preset("huge")
