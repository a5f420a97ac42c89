"""Checkpoints: one file each, whole or not there.

A checkpoint is a safetensors file: all tensors of the run (weights, optimizer, random state)
and, in its header, the facts that are no tensors (step, config, fingerprint of the text) with
a checksum of every tensor.  It is written under another name, flushed to the disk, and then
renamed: a rename is atomic, so whatever stops the process (Ctrl-C, a full disk, a power cut)
leaves the files that were whole before.  An older one goes only once a newer one is whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from backstash.errors import CheckpointError

_FORMAT = "backstash-1"
_PATTERN = "step-*.safetensors"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Everything a run needs to go on from ``step`` as if it had never stopped."""

    step: int
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose name begins with ``prefix.``, without it."""
        start = f"{prefix}."
        return {k.removeprefix(start): v for k, v in self.tensors.items() if k.startswith(start)}


def write_checkpoint(folder: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write the checkpoint into ``folder`` and delete all but the newest ``keep``.

    Raises:
        CheckpointError: the file could not be written; those in the folder are untouched.
    """
    path = folder / f"step-{checkpoint.step:08d}.safetensors"
    unfinished = folder / f".{path.name}.unfinished"
    tensors = {name: t.detach().cpu().contiguous() for name, t in checkpoint.tensors.items()}
    header = {
        "format": _FORMAT,
        "step": json.dumps(checkpoint.step),
        "facts": json.dumps(dict(checkpoint.facts)),
        "checksums": json.dumps({name: _checksum(t) for name, t in tensors.items()}),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, unfinished, metadata=header)
        _flush(unfinished)
        os.replace(unfinished, path)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        newest = newest_checkpoint(folder)
        kept = "there is no earlier one" if newest is None else f"{newest} is whole"
        raise CheckpointError(
            f"the checkpoint {path} could not be written: {error}; {kept}; make room on the disk "
            "or pass another --run, and resume"
        ) from error
    finally:
        # Also on Ctrl-C.  After the rename there is nothing under this name.
        unfinished.unlink(missing_ok=True)
    for old in checkpoints(folder)[:-keep]:
        old.unlink(missing_ok=True)
    return path


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and compare every tensor with its checksum.

    Raises:
        CheckpointError: the file is missing, cut short, damaged, or no checkpoint of ours.
    """
    if not path.is_file():
        raise CheckpointError(
            f"there is no checkpoint {path}; pass the folder of a run that saved one"
        )
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if header.get("format") != _FORMAT:
            raise CheckpointError(
                f"{path} has to be a checkpoint in format {_FORMAT}, got {header.get('format')!r}; "
                "pass a folder that backstash train wrote"
            )
        step, facts, checksums = (json.loads(header[k]) for k in ("step", "facts", "checksums"))
        _check_header(step, facts, checksums)
    except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{_damaged(path)} ({error})") from error
    wrong = [name for name, t in tensors.items() if checksums.get(name) != _checksum(t)]
    if wrong or set(checksums) != set(tensors):
        names = ", ".join(wrong) or "some tensors are missing"
        raise CheckpointError(f"{_damaged(path)} (checksum of {names})")
    return Checkpoint(step=step, tensors=tensors, facts=facts)


def replace_text(path: Path, text: str) -> None:
    """Write a small file of a run so that a reader sees the old one or the new one, whole.

    Raises:
        CheckpointError: it cannot be written; the old one is untouched.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        raise not_written(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def not_written(path: Path, error: OSError) -> CheckpointError:
    """What to raise where a file of a run cannot be written."""
    return CheckpointError(
        f"{path} could not be written: {error}; checkpoints that are there are whole: make room "
        "on the disk, or give write permission, and resume"
    )


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``, oldest first."""
    return sorted(folder.glob(_PATTERN))


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint in ``folder``, or ``None`` if it holds none."""
    return next(reversed(checkpoints(folder)), None)


def _check_header(step: Any, facts: Any, checksums: Any) -> None:
    """Raise ``KeyError`` with what is wrong in a header."""
    if type(step) is not int or step < 0:
        raise KeyError(f"step is {step!r}")
    if not isinstance(facts, dict) or not isinstance(facts.get("config", {}), dict):
        raise KeyError("facts")
    if not isinstance(checksums, dict):
        raise KeyError("checksums")


def _damaged(path: Path) -> str:
    return (
        f"the checkpoint {path} is damaged; delete it to go on from the one before it, or start "
        "again with --start fresh"
    )


def _checksum(tensor: Tensor) -> int:
    flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor.to(torch.uint8)
    return zlib.crc32(flat.numpy().data)


def _flush(path: Path) -> None:
    """Wait until the file's bytes, or the folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
