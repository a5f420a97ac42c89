"""Several ranks train the model that one process trains, and a run changes between them.

The numbers are compared on the processes of one test run.  The command itself, and what it
does when a rank fails, needs processes of its own, started by ``torchrun``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks as Pool
from safetensors.torch import load_file

from backstash.device import LaunchEnvironment
from backstash.errors import CheckpointError, ConfigError, DeviceError, PeerError
from backstash.formats import FLOAT8_DELAYED
from backstash.nn.module import scaling_state
from backstash.train import metrics
from backstash.train import ranks as train_ranks
from backstash.train.config import TrainConfig
from backstash.train.loop import Trainer
from backstash.train.ranks import Ranks, naming_peers, open_ranks, own_device
from backstash.train.session import Outcome, open_corpus, train_on
from backstash.train.state import newest_checkpoint
from train_cases import Silent, resumed, small_model, small_run

pytestmark = pytest.mark.distributed

# Sums over a batch are rounded once for each part it is cut into, and again in each of the
# few steps of a run; a bfloat16 model is rounded to bfloat16 in each of them.
TOLERANCE = {"float32": 64 * torch.finfo(torch.float32).eps, "bfloat16": 2.0**-8}
COMMAND_S = 120
COMPARED = {"loss", "grad_norm", "held_out_loss", "learning_rate"}


def config_of(folder: Path, **fields: Any) -> TrainConfig:
    model = small_model(balance_loss=0.01, shared_width=16)
    values = {"batch": 4, "recipe": "high_precision", "model": model, "shard_weights": True}
    return small_run(folder, **(values | fields))


def check_train(group: dist.ProcessGroup | None, config: TrainConfig) -> list[dict[str, float]]:
    """Train, and return the records that the first rank wrote."""
    return _train(Ranks() if group is None else Ranks.of(group, group), config).records


def _train(ranks: Ranks, config: TrainConfig) -> Outcome:
    without: Any = metrics
    before, without._open_tensorboard = without._open_tensorboard, lambda *_: None
    try:
        output = Silent()
        outcome = train_on(ranks, config, output)
    finally:
        without._open_tensorboard = before
    assert bool(output.lines) == ranks.is_first
    return outcome


def on(pool: Pool, size: int, config: TrainConfig) -> list[dict[str, float]]:
    """Records of a run on so many ranks; one of them is this process."""
    if size == 1:
        return check_train(None, config)
    first, *others = pool.run(check_train, config, size=size)
    assert all(records == first for records in others)
    return first


def assert_same_curve(got: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    assert [r["step"] for r in got] == [r["step"] for r in wanted]
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.keys() == theirs.keys()
        for name in COMPARED & mine.keys():
            assert mine[name] == pytest.approx(theirs[name], rel=TOLERANCE["float32"]), name
        for name in ("expert_load_max", "expert_load_mean"):
            assert mine.get(name) == theirs.get(name)


CASES: dict[str, dict[str, Any]] = {
    "once": {},
    "accumulated": {"accumulate": 2},
    "recomputed": {"recompute": "reentrant"},
}


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES.keys())
def test_two_ranks_have_the_losses_of_one(
    ranks: Pool, tmp_path: Path, fields: dict[str, Any]
) -> None:
    config = config_of(tmp_path, **fields)
    wanted = on(ranks, 1, dataclasses.replace(config, run=tmp_path / "one"))
    assert_same_curve(on(ranks, 2, config), wanted)


def test_two_ranks_have_the_losses_of_one_in_bfloat16(ranks: Pool, tmp_path: Path) -> None:
    config = config_of(tmp_path, dtype="bfloat16", recipe="mxfp8")
    wanted = on(ranks, 1, dataclasses.replace(config, run=tmp_path / "one"))
    got = on(ranks, 2, config)
    losses = [[r["loss"] for r in records if "loss" in r] for records in (got, wanted)]
    assert losses[0] == pytest.approx(losses[1], rel=TOLERANCE["bfloat16"])


def check_learnt(group: dist.ProcessGroup, config: TrainConfig) -> tuple[list[float], list[Any]]:
    """The losses, and the scales that this rank has learnt."""
    outcome = _train(Ranks.of(group, group), config)
    learnt = scaling_state(outcome.trainer.model).items()
    scales = [(name, scaling.scale_G.tolist()) for name, scaling in learnt]
    return [record["loss"] for record in outcome.records if "loss" in record], scales


def test_all_ranks_learn_the_same_scales_and_those_of_one(ranks: Pool, tmp_path: Path) -> None:
    config = config_of(tmp_path, recipe="float8_delayed")
    (losses, scales), other = ranks.run(check_learnt, config)
    assert other == (losses, scales)
    one = dataclasses.replace(config, run=tmp_path / "one", shard_weights=False)
    alone = _train(Ranks(), one).trainer
    records = metrics.read_metrics(one.run / "metrics.jsonl")
    wanted = [record["loss"] for record in records if "loss" in record]
    assert losses == pytest.approx(wanted, rel=FLOAT8_DELAYED.rtol)
    of_inputs = {name: scale for name, scale in scales if name.endswith("input")}
    assert of_inputs
    for name, scaling in scaling_state(alone.model).items():
        if name in of_inputs:
            got = torch.tensor(of_inputs[name])
            torch.testing.assert_close(got, scaling.scale_G, rtol=FLOAT8_DELAYED.rtol, atol=0)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_of_two_ranks_goes_on_with_another_number(
    ranks: Pool, tmp_path: Path, size: int, dtype: str
) -> None:
    config = config_of(tmp_path, dtype=dtype)
    wanted = on(ranks, 2, dataclasses.replace(config, run=tmp_path / "whole"))
    on(ranks, 2, dataclasses.replace(config, stop_after=2))
    got = on(ranks, size, resumed(config))
    if dtype == "float32":
        assert_same_curve(got, wanted)
    losses = [[r["loss"] for r in records if "loss" in r] for records in (got, wanted)]
    assert losses[0] == pytest.approx(losses[1], rel=TOLERANCE[dtype])


def test_a_checkpoint_of_two_ranks_is_that_of_one(ranks: Pool, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    one = dataclasses.replace(config, run=tmp_path / "one", shard_weights=False)
    on(ranks, 1, one)
    on(ranks, 2, config)
    got, wanted = (_tensors(folder) for folder in (config.run, one.run))
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].shape == tensor.shape, name
        assert got[name].dtype == tensor.dtype, name
        if name.startswith("random."):
            assert torch.equal(got[name], tensor), name


def test_a_run_of_one_process_goes_on_with_two(ranks: Pool, tmp_path: Path) -> None:
    config = config_of(tmp_path, shard_weights=False)
    wanted = on(ranks, 1, dataclasses.replace(config, run=tmp_path / "whole"))
    on(ranks, 1, dataclasses.replace(config, stop_after=2))
    got = on(ranks, 2, dataclasses.replace(resumed(config), shard_weights=True))
    assert_same_curve(got, wanted)


def _tensors(run: Path) -> dict[str, torch.Tensor]:
    path = newest_checkpoint(run / "checkpoints")
    assert path is not None
    return load_file(path)


def check_account(group: dist.ProcessGroup, config: TrainConfig) -> tuple[int, int]:
    """How many ranks the trainer that is left has, and how many whole weights."""
    outcome = _train(Ranks.of(group, group), config)
    return outcome.trainer.ranks.size, sum(p.numel() for p in outcome.trainer.model.parameters())


def test_the_account_of_a_run_is_made_by_the_first_rank_alone(ranks: Pool, tmp_path: Path) -> None:
    config = config_of(tmp_path, account=True)
    (size, parameters), (others, part) = ranks.run(check_account, config)
    assert (size, others) == (1, 2)
    whole = Trainer(config, open_corpus(config)).model
    assert parameters == sum(p.numel() for p in whole.parameters())
    assert part < parameters


def check_a_failed_write(group: dist.ProcessGroup, failure: Exception) -> str:
    def write() -> None:
        raise failure

    try:
        Ranks.of(group, group).first_does(write)
    except (type(failure), PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("kind", [CheckpointError, OSError, RuntimeError, MemoryError])
def test_what_the_first_rank_cannot_write_ends_all(ranks: Pool, kind: type[Exception]) -> None:
    first, other = ranks.run(check_a_failed_write, kind("the disk is full"))
    assert first == f"{kind.__name__}: the disk is full"
    assert other.startswith("PeerError: rank 0 could not write")


# --- what cannot be ----------------------------------------------------------------------------


def test_a_batch_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"multiple of the 3 ranks.* got 4; pass --batch 6"):
        Ranks(size=3).check(config_of(tmp_path))


def launched(monkeypatch: pytest.MonkeyPatch, **numbers: int) -> None:
    launch = LaunchEnvironment(**numbers)
    monkeypatch.setattr(train_ranks, "launch_environment", lambda: launch)


def test_one_process_needs_no_group(tmp_path: Path) -> None:
    with open_ranks(config_of(tmp_path)) as ranks:
        assert ranks == Ranks()
        assert not dist.is_initialized()


def test_processes_without_shard_weights_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launched(monkeypatch, world_size=2)
    with (
        pytest.raises(ConfigError, match="pass --shard-weights"),
        open_ranks(config_of(tmp_path, shard_weights=False)),
    ):
        pass


def test_one_gpu_for_all_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="pass --device cuda and each takes its own"):
        own_device("cuda:0")
    launched(monkeypatch, world_size=2, rank=1, local_rank=1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DeviceError, match="PyTorch sees 1 for process 2"):
        own_device("cuda")
    assert own_device("cpu") == torch.device("cpu")


def test_only_failures_of_a_collective_are_laid_on_a_peer() -> None:
    with pytest.raises(PeerError, match="another rank of this run has gone"), naming_peers():
        raise RuntimeError("[third_party/gloo/pair.cc] Connection closed by peer")
    with pytest.raises(RuntimeError, match="shapes") as caught, naming_peers():
        raise RuntimeError("shapes do not fit")
    assert not isinstance(caught.value, PeerError)


# --- the command -------------------------------------------------------------------------------


def torchrun(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run two processes, and kill them all if they hang."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # Whoever runs the tests may have named the sources relative to a folder other than this.
    sources = str(Path(train_ranks.__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1"}
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    process = subprocess.Popen(
        [*command, "--nproc-per-node", "2", *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=COMMAND_S)
    except subprocess.TimeoutExpired:
        # It passes the signal on to its ranks, which are in sessions of their own.
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        raise AssertionError(f"still running after {COMMAND_S} seconds\n{out}\n{err}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


SIZES = [
    *("--model.context=16", "--model.layers=1", "--model.hidden=16", "--model.heads=2"),
    *("--model.kv-heads=1", "--model.head-width=8", "--model.experts=2", "--model.expert-width=16"),
    *("--recipe=high_precision", "--steps=3", "--data=text", "--device=cpu", "--shard-weights"),
]


def test_the_command_speaks_once_and_leaves_a_whole_run(tmp_path: Path) -> None:
    config_of(tmp_path)  # for its text
    words = ["train", "--preset", "tiny", "--run", "run", *SIZES, "--account"]
    done = torchrun("-m", "--", "backstash", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("unigram entropy of the held-out text:") == 1
    assert done.stdout.count("what the model writes:") == 1
    assert "2 ranks, 1 sequences of each batch on each" in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["bit_equal_under_hooks"]
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == [
        "step-00000003.safetensors"
    ]


PROGRAM = """
import os, sys
from backstash import cli
from backstash.train import attention, model

calls = 0
def attend(*args, **options):
    global calls
    calls += 1
    if calls == 3 and os.environ["RANK"] == "1":
        raise MemoryError("this rank has no memory left")
    return attention.attend(*args, **options)

model.attend = attend
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    config_of(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["train", "--preset", "tiny", "--run", "run", *SIZES]
    done = torchrun("--", "program.py", *words, folder=tmp_path)
    assert done.returncode != 0
    assert "this rank has no memory left" in done.stderr
    assert "backstash train (rank 0 of 2): " in done.stderr, done.stderr
