"""The folder of a run: which files are its, and that two runs never mix in it.

```
config.json         the config, to resume or to generate without repeating options
checkpoints/        step-00000100.safetensors, ...
metrics.jsonl       one line a step
tensorboard/        the same, if TensorBoard is installed
summary.json        what came out
index.html          the same as a page
```
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from backstash.errors import CheckpointError, ConfigError
from backstash.train.config import Start, TrainConfig, config_from_json, config_to_json
from backstash.train.state import newest_checkpoint, replace_text


class RunFolder:
    """Paths within the folder of one run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.json"
        self.checkpoints = root / "checkpoints"
        self.metrics = root / "metrics.jsonl"
        self.tensorboard = root / "tensorboard"
        self.summary = root / "summary.json"
        self.page = root / "index.html"

    def check(self, start: Start) -> None:
        """Check that a run can start in this way, and change nothing.

        Raises:
            ConfigError: ``"new"`` and there is a run in the folder already, or ``"fresh"`` and
                the files there are those of something else.
            CheckpointError: ``"resume"`` and there is no checkpoint to go on from.
        """
        if start == "resume":
            self.newest_checkpoint()
        if start == "new" and any(path.exists() for path in self._files()):
            raise ConfigError(
                f"{self.root} has to be a folder without a run in it, and there is one; "
                f"go on with it (--resume {self.root}), delete it (--start fresh), or pass "
                "another --run"
            )
        if start == "fresh":
            self._check_ours()

    def _check_ours(self) -> None:
        """Refuse to delete files that have the names of a run's but belong to something else."""
        found = [path.name for path in self._files() if path.exists()]
        if found and not self._is_run():
            raise ConfigError(
                f"{self.root} has {', '.join(found)} but no config.json of a run, so nothing in it "
                "is deleted; pass another --run, or move them away"
            )

    def _is_run(self) -> bool:
        try:
            values = json.loads(self.config.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return isinstance(values, dict) and {"model", "optimizer", "recipe"} <= values.keys()

    def prepare(self, start: Start) -> None:
        """Make the folder, and delete the run in it if ``start`` is ``"fresh"``.

        Only what a run of ours writes is ever deleted.

        Raises:
            ConfigError: the folder cannot be made or emptied.
        """
        self.check(start)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for path in self._files() if start == "fresh" else ():
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the run folder {self.root} cannot be written: {error}; pass another --run"
            ) from error

    def newest_checkpoint(self) -> Path:
        """Return the checkpoint to go on from.

        Raises:
            CheckpointError: there is none.
        """
        path = newest_checkpoint(self.checkpoints)
        if path is None:
            raise CheckpointError(
                f"{self.root} has to hold a run with a checkpoint, and there is none; "
                "pass the --run folder of an earlier backstash train"
            )
        return path

    def write_config(self, config: TrainConfig) -> None:
        """Write ``config.json``."""
        write_json(self.config, config_to_json(config))

    def read_config(self) -> TrainConfig:
        """Read ``config.json``.

        Raises:
            CheckpointError: there is no such file, or it is no config.
        """
        try:
            values = json.loads(self.config.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.config} cannot be read: {error}; pass the --run folder of an earlier "
                "backstash train"
            ) from error
        try:
            return config_from_json(values, TrainConfig)
        except ConfigError as error:
            raise CheckpointError(
                f"{self.config} is not the config of a run: {error}; put it right, or pass the "
                "--run folder of an earlier backstash train"
            ) from error

    def _files(self) -> tuple[Path, ...]:
        return (
            *(self.config, self.checkpoints, self.metrics),
            *(self.tensorboard, self.summary, self.page),
        )


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write ``value`` so that a reader sees either the old file or the new one, whole.

    Raises:
        CheckpointError: the file cannot be written; the old one is untouched.
    """
    replace_text(path, json.dumps(value, indent=2) + "\n")
