"""Two runs never mix in a folder, and nothing of the user's is deleted from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from backstash.errors import CheckpointError, ConfigError
from backstash.train.config import TrainConfig
from backstash.train.folder import RunFolder, write_json
from backstash.train.state import Checkpoint, write_checkpoint


def used_folder(root: Path) -> RunFolder:
    folder = RunFolder(root)
    folder.prepare("new")
    folder.write_config(TrainConfig(run=root))
    write_checkpoint(folder.checkpoints, Checkpoint(step=1, tensors={}, facts={}), keep=1)
    folder.metrics.write_text('{"step": 1}\n')
    return folder


def test_a_new_run_makes_its_folder(tmp_path: Path) -> None:
    RunFolder(tmp_path / "a" / "b").prepare("new")
    assert (tmp_path / "a" / "b").is_dir()


def test_a_new_run_is_refused_where_there_is_one(tmp_path: Path) -> None:
    folder = used_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"--resume.*--start fresh.*--run"):
        folder.prepare("new")
    assert folder.metrics.exists()


def test_a_fresh_start_deletes_the_run_and_nothing_else(tmp_path: Path) -> None:
    folder = used_folder(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    folder.prepare("fresh")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("text", [None, "{", "[1]", '{"mine": 1}'])
def test_a_fresh_start_deletes_nothing_that_no_run_wrote(tmp_path: Path, text: str | None) -> None:
    (tmp_path / "index.html").write_text("mine")
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"index\.html.*nothing in it is deleted"):
        RunFolder(tmp_path).prepare("fresh")
    assert sorted(tmp_path.iterdir()) == before


def test_a_resume_keeps_the_run(tmp_path: Path) -> None:
    folder = used_folder(tmp_path)
    folder.prepare("resume")
    assert folder.newest_checkpoint().exists()
    assert folder.metrics.exists()


def test_there_is_nothing_to_resume_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is none"):
        RunFolder(tmp_path).prepare("resume")


def test_a_folder_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="another --run"):
        RunFolder(tmp_path / "file" / "run").prepare("new")


def test_the_config_comes_back(tmp_path: Path) -> None:
    folder = used_folder(tmp_path)
    assert folder.read_config() == TrainConfig(run=tmp_path)


@pytest.mark.parametrize("text", [None, "", "{", "nonsense"])
def test_a_config_that_cannot_be_read_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read"):
        RunFolder(tmp_path).read_config()


@pytest.mark.parametrize("text", ["[1]", '{"steps": "x"}', '{"model": 3}', '{"colour": 1}', "null"])
def test_a_config_that_is_none_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json is not the config of a run"):
        RunFolder(tmp_path).read_config()


def test_json_that_cannot_be_written_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"could not be written.*make room"):
        write_json(tmp_path / "file" / "x.json", {})


def test_json_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert path.read_text() == '{\n  "a": 1\n}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
