"""The command line: ``backstash train | generate | estimate | check | bench``.

Options are the fields of the config dataclasses, read by ``tyro``; ``--help`` of a command
shows them all.  A command is imported when it is asked for.

A mistake in the options or the data, or a GPU that is not there, ends with one message on
standard error and status 2, anything that goes wrong later in a run with status 1, and Ctrl-C
with 130.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import tyro

from backstash import device
from backstash.errors import BackstashError, ConfigError, DataError, DeviceError
from backstash.formats import Usage
from backstash.recipes import recipe, recipe_names
from backstash.train.config import TrainConfig

if TYPE_CHECKING:
    from backstash.train.session import Outcome

_INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """A run: that of a preset or of a folder, and what should differ."""

    preset: Literal["demo", "small", "tiny"] | None = None
    """Run to start from: demo (two minutes on a CPU), tiny (seconds), small (hours)."""
    resume: Path | None = None
    """Go on with the run in this folder, with the options it was started with."""
    config: Annotated[TrainConfig, tyro.conf.arg(name="")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the status to exit with."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words == ["--version"]:
        print(f"backstash {device.installed_version()}")
        return 0
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0 if words else 2
    name, *rest = words
    if name not in COMMANDS:
        print(f"backstash: there is no command {name!r}\n\n{_overview()}", file=sys.stderr)
        return 2
    try:
        return COMMANDS[name](rest)
    except BackstashError as error:
        print(f"backstash {name}{_which_rank()}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | DataError | DeviceError) else 1
    except KeyboardInterrupt:
        print(f"backstash {name}: interrupted", file=sys.stderr)
        return _INTERRUPTED


def train(arguments: Sequence[str]) -> int:
    """Train a language model. Start from a preset and override what should differ."""
    config = _train_config("train", arguments)
    session = importlib.import_module("backstash.train.session")
    outcome: Outcome = session.train(config)
    is_first = outcome.trainer.ranks.is_first
    if outcome.ending is session.Ending.STOPPED:
        if is_first:
            print(
                f"stopped after step {outcome.trainer.finished_steps}; go on with: "
                f"backstash train --resume {config.run}"
            )
        return 0 if outcome.trainer.finished_steps == config.stop_after else _INTERRUPTED
    if is_first:
        _finish(outcome)
    return 0


def _finish(outcome: Outcome) -> None:
    demo = importlib.import_module("backstash.train.demo")
    write_json = importlib.import_module("backstash.train.folder").write_json
    summary = demo.summarize(outcome)
    if outcome.trainer.config.account:
        summary |= demo.account(outcome.trainer)
    write_json(outcome.folder.summary, summary)
    if not outcome.trainer.config.account:
        print(json.dumps(summary, indent=2))
        return
    rows = demo.table(summary)
    _print_table(rows)
    print(f"\nwhat the model writes:\n\n{summary['sample']}\n")
    importlib.import_module("backstash.report").write_page(
        outcome.folder.page,
        title=f"backstash: {outcome.folder.root.name}",
        rows=rows,
        curves=demo.curves(outcome),
        level=("unigram entropy", outcome.loss_unigram),
        sample=summary["sample"],
    )
    print(f"summary: {outcome.folder.summary}")
    print(f"page:    {outcome.folder.page.resolve()}")


def generate(arguments: Sequence[str]) -> int:
    """Write text with a trained model."""
    module = importlib.import_module("backstash.train.generate")
    config = tyro.cli(
        module.GenerateConfig,
        prog="backstash generate",
        description=generate.__doc__,
        args=list(arguments),
    )
    for text in module.generate_from_run(config):
        print(text, end="", flush=True)
    print()
    return 0


def estimate(arguments: Sequence[str]) -> int:
    """Say what a run will need, without running it. Its options are those of train."""
    config = _train_config("estimate", arguments)
    if config.stash:
        importlib.import_module("backstash.train.stash").check_takes(config)
    _print_table(importlib.import_module("backstash.train.peak").table(config))
    return 0


def check(arguments: Sequence[str]) -> int:
    """Say what this machine can run, and what multiplies under each recipe."""
    _refuse_options("check", arguments)
    product = importlib.import_module("backstash.nn.product")
    print(device.describe())
    here = device.default_device()
    capability = torch.cuda.get_device_capability(here) if here.type == "cuda" else None
    for name in recipe_names():
        chosen = recipe(name)
        if name == "high_precision":
            print(f"recipe    {name}: inputs kept and multiplied in the layer's dtype")
            continue
        format = chosen.input
        bits = 8 * format.saved_bytes(1024, 1024, torch.float32, Usage.COLUMNWISE) / 1024**2
        print(f"recipe    {name}: inputs kept in {bits:.2f} bits a value")
        taken = [product.paths(chosen, capability, is_grouped=grouped) for grouped in (False, True)]
        if taken[0] == taken[1]:
            _print_paths("one weight and groups", taken[0])
            continue
        _print_paths("one weight", taken[0])
        _print_paths("groups", taken[1])
    return 0


def _print_paths(where: str, taken: Mapping[Any, Any]) -> None:
    for path in dict.fromkeys(taken.values()):
        names = [which.name for which in taken if taken[which] is path]
        words = ", ".join(names).lower().replace("_", " ")
        words = "all matmuls" if len(names) == len(taken) else words
        print(f"          {where}, {words}: {path.value}")


def bench(arguments: Sequence[str]) -> int:
    """Measure; bench alone lists what there is."""
    return importlib.import_module("backstash.bench").main(list(arguments))


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train,
    "generate": generate,
    "estimate": estimate,
    "check": check,
    "bench": bench,
}


def _overview() -> str:
    lines = [
        "usage: backstash COMMAND [options]      (backstash COMMAND --help for the options)",
        "       backstash --version",
        "",
    ]
    for name, command in COMMANDS.items():
        lines.append(f"  {name:<10} {(command.__doc__ or '').splitlines()[0]}")
    return "\n".join(lines)


def _train_config(command: str, arguments: Sequence[str]) -> TrainConfig:
    """Read the options over the preset, or over the run, that they start from."""
    base = _base_config(_value_of("--preset", arguments), _value_of("--resume", arguments))
    options: Any = tyro.cli(
        TrainOptions,
        prog=f"backstash {command}",
        description=COMMANDS[command].__doc__,
        args=list(arguments),
        default=TrainOptions(config=base),
    )
    if options.preset is not None and options.resume is not None:
        raise ConfigError(
            "a run starts from --preset or from --resume, got both; with --resume the options of "
            "the run are known already, so leave --preset out"
        )
    if options.resume is not None:
        return dataclasses.replace(options.config, run=options.resume, start="resume")
    return options.config


def _base_config(preset_name: str | None, resumed: str | None) -> TrainConfig:
    presets = importlib.import_module("backstash.train.presets")
    if resumed is not None:
        folder = importlib.import_module("backstash.train.folder").RunFolder(Path(resumed))
        return dataclasses.replace(folder.read_config(), stop_after=None)
    # An unknown name is refused by tyro, with the names there are.
    return presets.preset(preset_name) if preset_name in presets.PRESETS else TrainConfig()


def _which_rank() -> str:
    """Say which of several processes speaks; all of them write to one terminal."""
    try:
        launch = device.launch_environment()
    except ConfigError:
        return ""
    return f" (rank {launch.rank} of {launch.world_size})" if launch.world_size > 1 else ""


def _value_of(option: str, arguments: Sequence[str]) -> str | None:
    """Return what follows ``option``, before the options are really read."""
    for index, word in enumerate(arguments):
        if word.startswith(f"{option}="):
            return word.removeprefix(f"{option}=")
        if word == option and index + 1 < len(arguments):
            return arguments[index + 1]
    return None


def _refuse_options(command: str, arguments: Sequence[str]) -> None:
    if arguments in (["-h"], ["--help"]):
        print(f"usage: backstash {command}\n\n{COMMANDS[command].__doc__}")
        raise SystemExit(0)
    if arguments:
        raise ConfigError(f"{command} takes no options, got {' '.join(arguments)}; leave them out")


def _print_table(rows: Sequence[tuple[str, str]]) -> None:
    width = min(max(len(name) for name, _ in rows), shutil.get_terminal_size().columns // 2 + 8)
    print()
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")
