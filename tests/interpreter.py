"""Tests of kernels in Triton's interpreter, which run in a process of their own.

Triton must be told to interpret before it is imported, so a test of each file starts a run
that is.  Tests with the marker ``interpreted`` are those of that run; in any other they are
deselected.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

interpreted = pytest.mark.interpreted
#: In the interpreter, and on a GPU.
by_device = pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)],
)


def run_interpreted(file: str) -> None:
    """Run the tests of a file that need the interpreter, and see that all of them ran.

    That of Triton 3.6 stumbles over numpy 2.4, which makes no number of an array of one element.
    """
    pytest.importorskip("triton", minversion="3.9")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-m", "interpreted", file]
    # A plugin would take the run for a part of this one.
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = ours | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout
