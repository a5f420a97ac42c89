"""What is measured in each step, and the places it is written to.

A *record* is a flat mapping from names to numbers with a ``step`` in it.  The same record
goes to ``metrics.jsonl`` (one JSON object a line), to TensorBoard if it is installed, and to
the terminal: a progress bar where there is one, plain lines where output goes to a file.

``step`` counts finished optimizer steps, so the record with step 0 describes the model
before any.  ``held_out_loss`` is there only in steps that evaluated.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch

from backstash.errors import CheckpointError
from backstash.train.state import not_written, replace_text

Record = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class StashMetrics:
    """What the stash holds when the step's last forward pass is done, which is when it holds most.

    Attributes:
        stash_pages_used: pages in use, those in host memory included.
        stash_fill: the share of the device's pages that is in use.
        stash_high_bytes: most bytes of pages that were ever in use at once.
        stash_spilled_bytes: bytes of pages that this step took in host memory.
        stash_kept_bytes: bytes of buffers that stayed where they were, for want of room.
    """

    stash_pages_used: int
    stash_fill: float
    stash_high_bytes: int
    stash_spilled_bytes: int
    stash_kept_bytes: int


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Measurements of one optimizer step.

    Attributes:
        step: optimizer steps finished, this one included.
        loss: mean training loss of the step, nats a token.
        grad_norm: norm of all gradients before clipping.
        learning_rate: that of this step.
        tokens_per_s: tokens learned from in a second of this step.
        saved_bytes: distinct bytes that one forward pass kept for backward, without weights.
        peak_memory_bytes: most memory held so far, of the GPU or of this process.
        expert_load_max: rows of the busiest expert of any layer.
        expert_load_mean: rows of the average expert.
        stash: those of the stash, where there is one.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_s: float
    saved_bytes: int
    peak_memory_bytes: int
    expert_load_max: int
    expert_load_mean: float
    stash: StashMetrics | None = None

    def record(self) -> dict[str, float]:
        """Return the measurements by name; without a stash there are none of it."""
        values = asdict(self)
        stash = values.pop("stash")
        return values if stash is None else values | stash


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory held so far: on the GPU, or resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return all records of a ``metrics.jsonl``; none if there is no such file.

    A last line without an end was cut short when the run died, and is no record.

    Raises:
        CheckpointError: the file cannot be read, or a line is no JSON object with a step in it.
    """
    records: list[dict[str, float]] = []
    if not path.exists():
        return records
    try:
        *lines, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; move it away") from error
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record["step"], int):
                raise TypeError(f"step is {record['step']!r}")
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"line {number} of {path} has to be a JSON object with a step, got {line[:60]!r}; "
                "delete the line"
            ) from error
        records.append(record)
    return records


class MetricsLog:
    """Appends records to ``metrics.jsonl`` and, if it is installed, to TensorBoard."""

    def __init__(self, path: Path, tensorboard: Path, *, last_step: int) -> None:
        """Open the log and drop what was written after ``last_step``.

        A run that stopped between two checkpoints has written records of steps that the
        resumed run takes again.

        Raises:
            CheckpointError: the file cannot be read or written.
        """
        kept = [r for r in read_metrics(path) if r["step"] <= last_step] if last_step else []
        replace_text(path, "".join(json.dumps(r) + "\n" for r in kept))
        self._path = path
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._board = _open_tensorboard(tensorboard, last_step)

    def write(self, record: Record) -> None:
        """Append one record; it is in the file when this returns.

        Raises:
            CheckpointError: it could not be written.
        """
        try:
            self._file.write(json.dumps(dict(record)) + "\n")
            self._file.flush()
        except OSError as error:
            raise not_written(self._path, error) from error
        if self._board is not None:
            for name, value in record.items():
                if name != "step":
                    self._board.add_scalar(name, value, int(record["step"]))

    def close(self) -> None:
        """Close the files."""
        # What could not be written was reported by write; closing tries it once more.
        with contextlib.suppress(OSError):
            self._file.close()
        if self._board is not None:
            self._board.close()


def _open_tensorboard(folder: Path, last_step: int) -> Any:
    if importlib.util.find_spec("tensorboard") is None:
        return None
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
    return writer(str(folder), purge_step=last_step + 1 if last_step else None)


class Output(Protocol):
    """Where a person follows a run."""

    def say(self, text: str) -> None:
        """Show a line."""
        ...

    def progress(self, record: Record) -> None:
        """Show how far the run is."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


class PlainOutput:
    """One line for every ``log_every`` steps; for files, pipes, and notebooks."""

    def __init__(self, *, steps: int, log_every: int, stream: TextIO | None = None) -> None:
        self._steps = steps
        self._log_every = log_every
        self._stream = stream or sys.stdout

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def progress(self, record: Record) -> None:
        step = int(record["step"])
        if step % self._log_every == 0 or step == self._steps or "held_out_loss" in record:
            self.say(f"step {step:>5}/{self._steps}  {describe(record)}")

    def close(self) -> None:
        pass


class RichOutput:
    """A progress bar with the newest measurements beside it; for terminals."""

    def __init__(self, *, steps: int) -> None:
        rich = importlib.import_module("rich.progress")
        self._progress = rich.Progress(
            rich.TextColumn("step {task.completed}/{task.total}"),
            rich.BarColumn(bar_width=20),
            rich.TimeRemainingColumn(compact=True),
            rich.TextColumn("{task.description}"),
        )
        self._task = self._progress.add_task("", total=steps)
        self._progress.start()

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def progress(self, record: Record) -> None:
        # The bar itself has room for the loss only; narrow terminals wrap.
        loss = f"loss {record['loss']:.3f}" if "loss" in record else ""
        self._progress.update(self._task, completed=int(record["step"]), description=loss)
        if "held_out_loss" in record:
            self.say(f"step {int(record['step']):>5}  {describe(record)}")

    def close(self) -> None:
        self._progress.stop()


def open_output(*, steps: int, log_every: int) -> Output:
    """Return the output that suits standard output."""
    if sys.stdout.isatty():
        return RichOutput(steps=steps)
    return PlainOutput(steps=steps, log_every=log_every)


def describe(record: Record) -> str:
    """Return the measurements that a person looks at, in a line."""
    parts = []
    if "held_out_loss" in record:
        parts.append(f"held-out {record['held_out_loss']:.3f}")
    if "loss" in record:
        load = record["expert_load_max"] / max(1e-9, record["expert_load_mean"])
        parts += [
            f"loss {record['loss']:.3f}",
            f"grad {record['grad_norm']:.2f}",
            f"{record['tokens_per_s']:,.0f} tokens/s",
            f"saved {mebibytes(record['saved_bytes'])}",
            f"expert load {load:.2f}",
        ]
    if "stash_fill" in record:
        parts.append(
            f"stash {record['stash_fill']:.0%} full, most {mebibytes(record['stash_high_bytes'])}, "
            f"spilled {mebibytes(record['stash_spilled_bytes'])}"
        )
    return "  ".join(parts)


def mebibytes(count: float) -> str:
    """Return a count of bytes as a person reads it."""
    return f"{count / 2**20:,.1f} MiB"
