"""Every line of results says by itself where its number came from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from backstash.bench.record import Row, append_rows, commit
from backstash.bench.timing import Pair
from backstash.errors import DataError

ROW = Row(
    case="saving",
    what="3 tensors",
    values=3,
    target=0.5,
    pair=Pair(ours_us=1.0, theirs_us=4.0, ratio=0.25, ratio_low=0.2, ratio_high=0.3, repeats=7),
)


def test_lines_are_appended_and_stand_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "saving.jsonl"
    append_rows(path, [ROW])
    append_rows(path, [ROW, ROW])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 3
    for line in lines:
        assert line["pair"]["ratio"] == 0.25
        assert line["machine"]
        assert line["versions"]["torch"] == torch.__version__
        assert line["commit"] == commit()


def test_results_that_cannot_be_written_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    with pytest.raises(DataError, match="cannot be written"):
        append_rows(file / "saving.jsonl", [ROW])


def test_without_git_the_commit_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert commit() == ""
