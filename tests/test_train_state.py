"""A checkpoint is whole or not there, and what is read is what was written."""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
from pathlib import Path

import pytest
import torch

from backstash.errors import CheckpointError
from backstash.train import state
from backstash.train.state import (
    Checkpoint,
    checkpoints,
    newest_checkpoint,
    read_checkpoint,
    write_checkpoint,
)


def checkpoint(step: int) -> Checkpoint:
    torch.manual_seed(step)
    tensors = {
        "model.weight": torch.randn(5, 3),
        "model.half": torch.randn(7).bfloat16(),
        "model.empty": torch.zeros(0, 3),
        "optimizer.step": torch.tensor(float(step)),
        "random.cpu": torch.get_rng_state(),
        "model.transposed": torch.randn(4, 6).t(),
    }
    return Checkpoint(step=step, tensors=tensors, facts={"config": {"seed": 3}, "fingerprint": "f"})


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    written = checkpoint(3)
    read = read_checkpoint(write_checkpoint(tmp_path, written, keep=1))
    assert read.step == 3
    assert read.facts == written.facts
    assert read.tensors.keys() == written.tensors.keys()
    for name, tensor in written.tensors.items():
        assert read.tensors[name].dtype == tensor.dtype
        assert torch.equal(read.tensors[name], tensor), name
    assert set(read.part("model")) == {"weight", "half", "empty", "transposed"}


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 9, 10, 100):
        write_checkpoint(tmp_path, checkpoint(step), keep=2)
    assert files(tmp_path) == ["step-00000010.safetensors", "step-00000100.safetensors"]
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert read_checkpoint(newest).step == 100


def test_the_same_step_can_be_written_again(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, checkpoint(1), keep=2)
    write_checkpoint(tmp_path, checkpoint(1), keep=2)
    assert len(checkpoints(tmp_path)) == 1


def test_an_empty_folder_has_no_newest(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "missing") is None


@pytest.mark.parametrize("where", ["fsync", "replace"])
@pytest.mark.parametrize("what", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_whatever_stops_the_writing_leaves_the_last_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, what: BaseException
) -> None:
    last = write_checkpoint(tmp_path, checkpoint(1), keep=1)

    def stop(*_: object) -> None:
        raise what

    monkeypatch.setattr(state.os, where, stop)
    wanted = CheckpointError if isinstance(what, OSError) else KeyboardInterrupt
    with pytest.raises(wanted):
        write_checkpoint(tmp_path, checkpoint(2), keep=1)
    monkeypatch.undo()
    assert files(tmp_path) == [last.name]
    assert read_checkpoint(last).step == 1


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name_and_its_name_before_others_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace, unlink = os.fsync, os.replace, Path.unlink

    def seen_fsync(descriptor: int) -> None:
        done.append("fsync of a folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "fsync")
        fsync(descriptor)

    def seen_replace(old: Path, new: Path) -> None:
        done.append("replace")
        replace(old, new)

    def seen_unlink(path: Path, missing_ok: bool = False) -> None:
        done.extend(["unlink"] if path.exists() else [])
        unlink(path, missing_ok)

    write_checkpoint(tmp_path, checkpoint(1), keep=1)
    monkeypatch.setattr(state.os, "fsync", seen_fsync)
    monkeypatch.setattr(state.os, "replace", seen_replace)
    monkeypatch.setattr(Path, "unlink", seen_unlink)
    write_checkpoint(tmp_path, checkpoint(2), keep=1)
    assert done == ["fsync", "replace", "fsync of a folder", "unlink"]


def test_a_full_disk_says_what_is_whole_and_what_to_do(tmp_path: Path) -> None:
    last = write_checkpoint(tmp_path, checkpoint(1), keep=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        with pytest.raises(CheckpointError, match=r"could not be written.*is whole.*make room"):
            write_checkpoint(tmp_path, checkpoint(2), keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert files(tmp_path) == [last.name]
    assert read_checkpoint(last).step == 1


def test_a_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        read_checkpoint(tmp_path / "step-00000001.safetensors")


@pytest.mark.parametrize("damage", ["cut", "empty", "header", "first byte", "last byte", "foreign"])
def test_a_damaged_checkpoint_is_refused_with_the_remedy(tmp_path: Path, damage: str) -> None:
    path = write_checkpoint(tmp_path, checkpoint(1), keep=1)
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    if damage == "cut":
        data = data[:-7]
    elif damage == "empty":
        data = bytearray()
    elif damage == "header":
        data[20] ^= 0xFF
    elif damage == "first byte":
        data[start] ^= 0x01
    elif damage == "last byte":
        data[-1] ^= 0x80
    else:
        data = bytearray(os.urandom(100))
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"damaged.*delete it"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": "-1"},
        {"step": "1.5"},
        {"step": "true"},
        {"facts": "3"},
        {"facts": "[]"},
        {"facts": '{"config": 3}'},
        {"checksums": "[]"},
        {"checksums": "{"},
    ],
    ids=str,
)
def test_a_checkpoint_with_a_wrong_header_is_refused(tmp_path: Path, wrong: dict[str, str]) -> None:
    path = write_checkpoint(tmp_path, checkpoint(1), keep=1)
    with state.safe_open(path, framework="pt") as file:
        header = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    state.save_file(tensors, path, metadata=header | wrong)
    with pytest.raises(CheckpointError, match=r"damaged.*delete it"):
        read_checkpoint(path)


def test_a_safetensors_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    state.save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match="has to be a checkpoint"):
        read_checkpoint(path)
