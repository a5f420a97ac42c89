"""Two processes on two GPUs train the model that one trains, and one goes on with what they saved.

Each is a command of its own, as a user gives it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backstash.formats import MXFP8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU"),
]

STEPS, STOP = 6, 3
RUN = "runs/demo"
SOURCES = str(Path(__file__).parents[2] / "src")
ONE = ("-m",)
TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
# One rank adds gradients up in another order than two; in low precision a value may then
# round the other way.
TOLERANCE = {"high_precision": 1e-4, "mxfp8": MXFP8.rtol}


def start(
    launcher: tuple[str, ...], folder: Path, *options: str, gpus: str
) -> subprocess.Popen[str]:
    """Start a run in a folder of its own, where the preset puts it."""
    folder.mkdir(exist_ok=True)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpus, "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join([SOURCES, environment.get("PYTHONPATH", "")])
    command = [sys.executable, *launcher, "backstash", "train", *options]
    return subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate()
    assert process.returncode == 0, output


def losses(folder: Path) -> dict[int, float]:
    """The loss of each step."""
    lines = (folder / RUN / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


@pytest.mark.parametrize("recipe", TOLERANCE)
def test_two_ranks_over_nccl_have_the_losses_of_one_and_one_goes_on(
    recipe: str, tmp_path: Path
) -> None:
    options = ["--preset", "demo", "--recipe", recipe, "--steps", str(STEPS), "--no-account"]
    options += ["--log-every", "1", "--save-every", str(STOP), "--evaluate-every", str(STEPS)]
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    first = start(ONE, alone, *options, gpus="0")
    sharded = ("--shard-weights", "--stop-after", str(STOP))
    second = start(TWO, shared, *options, *sharded, gpus="0,1")
    finish(first)
    finish(second)
    wanted = losses(alone)
    assert sorted(wanted) == list(range(1, STEPS + 1))
    got = losses(shared)
    assert sorted(got) == list(range(1, STOP + 1))
    finish(start(ONE, shared, "--resume", RUN, gpus="1"))
    got = losses(shared)
    assert got.keys() == wanted.keys()
    for step, loss in wanted.items():
        assert got[step] == pytest.approx(loss, rel=TOLERANCE[recipe]), step
