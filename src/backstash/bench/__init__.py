"""Measurements that can be repeated: ``backstash bench CASE``.

A case compares outputs first, then times ours and a yardstick in the same run, prints the
ratio first, and appends one JSON line a row, with machine, commit and versions, to a file
named after the case.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from backstash.bench import saving
from backstash.bench.record import append_rows
from backstash.bench.timing import MOST_REPEATS
from backstash.errors import ConfigError

# A case is a file with measure(repeats) -> rows and show(rows).
CASES: Mapping[str, ModuleType] = {"saving": saving}
RESULTS = Path("bench/results")
REPEATS = 25


def main(case: str = "saving", *, results: Path = RESULTS, repeats: int = REPEATS) -> None:
    """Run one case: print its table and append its rows to ``results/CASE.jsonl``.

    Args:
        case: A key of :data:`CASES`.
        results: The folder for the lines; it is made if it is not there.
        repeats: How many pairs of timings the medians are taken over.

    Raises:
        ConfigError: The case is unknown, or ``repeats`` is not positive.
    """
    if case not in CASES:
        raise ConfigError(f"bench needs one of the cases {sorted(CASES)}, got {case!r}")
    if not 1 <= repeats <= MOST_REPEATS:
        raise ConfigError(f"bench needs 1 to {MOST_REPEATS} repeats, got {repeats}")
    rows = CASES[case].measure(repeats)
    CASES[case].show(rows)
    append_rows(Path(results) / f"{case}.jsonl", rows)


__all__ = ["CASES", "REPEATS", "RESULTS", "main"]
