"""A case measures the rows that are asked for, by parts of their names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from backstash import bench
from backstash.bench.choice import chosen
from backstash.bench.record import Result
from backstash.errors import ConfigError

NAMES = ["factor 2, balanced", "factor 2, burst", "factor 4, balanced"]


def test_without_a_text_all_are_chosen() -> None:
    assert chosen(NAMES, []) == NAMES


def test_a_name_is_chosen_once_and_in_the_order_of_the_table() -> None:
    assert chosen(NAMES, ["burst", "factor 2"]) == NAMES[:2]
    assert chosen(NAMES, ["factor 4", "burst"]) == NAMES[1:]


def test_a_text_that_is_in_no_name_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match=r"'bursts'.*factor 2, burst"):
        chosen(NAMES, ["balanced", "bursts"])


def test_a_case_without_rows_to_choose_from_refuses_the_option() -> None:
    with pytest.raises(ConfigError, match="stash_step, not in cast; leave --only out"):
        bench.Options("cast", only=("balanced",))


def test_a_run_hands_the_texts_on_and_keeps_each_row_when_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def measure(repeats: int, only: tuple[str, ...]) -> Iterator[Result]:
        asked.extend([repeats, only])
        yield Result(case="stash", what="one")
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "CASES", {"stash": SimpleNamespace(measure=measure)})
    with pytest.raises(KeyboardInterrupt):
        bench.main(["stash", "--results", str(tmp_path), "--only", "on", "tw", "--repeats", "3"])
    assert asked == [3, ("on", "tw")]
    assert len((tmp_path / "stash.jsonl").read_text().splitlines()) == 1
