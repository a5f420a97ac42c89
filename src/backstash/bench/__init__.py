"""Measurements that can be repeated: ``backstash bench CASE``.

A case compares outputs first, then times ours and a yardstick in the same run, prints the
ratio first, and appends one JSON line a row, with machine, commit and versions, to a file
named after the case.  ``recipes`` is the one that times nothing: it compares losses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import tyro

from backstash.bench import cast, grouped_mm, moe, recipes, saving, stash, stash_step, weights
from backstash.bench.record import append_rows
from backstash.errors import ConfigError

# A case is a file with measure(repeats) -> rows and show(rows); recipes are given the jobs, and
# those with rows to choose from what is wanted of them.
CASES: Mapping[str, ModuleType] = {
    "cast": cast,
    "grouped_mm": grouped_mm,
    "moe": moe,
    "recipes": recipes,
    "saving": saving,
    "stash": stash,
    "stash_step": stash_step,
    "weights": weights,
}
CHOOSING = ("moe", "stash", "stash_step")
MOST_REPEATS = 10_000
MOST_JOBS = 256


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure one case, print its table, and append its rows to RESULTS/CASE.jsonl.

    Raises:
        ConfigError: The case is unknown, a count is not positive, or the case has no jobs or
            no rows to choose from.
    """

    case: tyro.conf.Positional[str]
    """What to measure; `backstash bench` alone lists the cases."""
    _: dataclasses.KW_ONLY
    results: Path = Path("bench/results")
    """Folder for the lines; it is made if it is not there."""
    repeats: int = 25
    """How many pairs of timings the medians are taken over; recipes take none."""
    jobs: int = 1
    """How many trainings run at once; recipes only."""
    only: tuple[str, ...] = ()
    """Parts of names: only rows that contain one are measured; moe, stash and stash_step only."""

    def __post_init__(self) -> None:
        if self.case not in CASES:
            raise ConfigError(f"bench needs one of the cases {sorted(CASES)}, got {self.case!r}")
        if not 1 <= self.repeats <= MOST_REPEATS:
            raise ConfigError(f"bench needs 1 to {MOST_REPEATS} repeats, got {self.repeats}")
        if not 1 <= self.jobs <= MOST_JOBS:
            raise ConfigError(f"bench needs 1 to {MOST_JOBS} jobs, got {self.jobs}")
        if self.jobs > 1 and self.case != "recipes":
            raise ConfigError(
                f"only recipes are compared {self.jobs} at once; timings of {self.case} would "
                f"disturb each other, leave --jobs out"
            )
        if self.only and self.case not in CHOOSING:
            raise ConfigError(
                f"rows can be chosen in {', '.join(CHOOSING)}, not in {self.case}; leave --only out"
            )


def main(arguments: Sequence[str]) -> int:
    """Run the case that the arguments name, or list the cases; returns the exit status.

    Raises:
        ConfigError: The arguments mean nothing (see :class:`Options`).
        DataError: The results cannot be written.
    """
    if not arguments:
        print("usage: backstash bench CASE [options]\n")
        for name, case in CASES.items():
            print(f"  {name:<10} {(case.__doc__ or '').splitlines()[0].replace('``', '')}")
        return 0
    run(tyro.cli(Options, prog="backstash bench", args=list(arguments)))
    return 0


def run(options: Options) -> None:
    """Measure, append each row as soon as it is there, and print the table.

    Raises:
        DataError: The results cannot be written.
    """
    case = CASES[options.case]
    given: list[object] = [options.jobs if case is recipes else options.repeats]
    if options.case in CHOOSING:
        given.append(options.only)
    rows = []
    for row in case.measure(*given):
        append_rows(options.results / f"{options.case}.jsonl", [row])
        rows.append(row)
    case.show(rows)


__all__ = ["CASES", "Options", "main", "run"]
