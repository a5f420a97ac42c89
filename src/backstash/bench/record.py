"""Where a number came from is part of the number: results as JSON lines.

Each line stands alone: the case, what was measured, when, on which machine, at which
commit, with which versions.  A line is appended and never changed.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from backstash.bench.timing import Pair
from backstash.device import device_name, installed_version
from backstash.errors import DataError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One row of a case, and what was measured in it."""

    case: str
    what: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(Result):
    """One row of a case that times: how many values, and how long they took."""

    values: int
    target: float | None
    pair: Pair


def append_rows(path: Path, rows: Sequence[Result]) -> None:
    """Append one line for each row; the folder is made if it is not there.

    Raises:
        DataError: The file cannot be written.
    """
    origin = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": device_name(torch.device("cpu")),
        "commit": commit(),
        "versions": versions(),
    }
    lines = [json.dumps(dataclasses.asdict(row) | origin) + "\n" for row in rows]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(lines)
    except OSError as error:
        raise DataError(f"results go to {path}, which cannot be written: {error}") from error


def versions() -> dict[str, str]:
    """The versions a timing depends on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backstash": installed_version(),
    }


def commit() -> str:
    """The commit of the sources that run, with ``+`` if they were changed; "" if not known."""
    here = Path(__file__).parent
    try:
        head = _git(here, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(here, "status", "--porcelain", "--", "..") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
