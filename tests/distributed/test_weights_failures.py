"""When a process dies, the others fail soon and say why; none hangs."""

from __future__ import annotations

import datetime
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks import join_world
from twins import Stack, stack_step

from backstash.errors import PeerError
from backstash.weights import shard_weights

pytestmark = pytest.mark.distributed

WORLD, TIMEOUT_S, SLACK_S = 3, 5, 60


def live_and_die(rank: int, store: str, way: str, answers: Any) -> None:
    """Train a step, and then the last rank is killed, or stops answering."""
    # A busy machine may take its time to start them; only then the short timeout begins.
    join_world(rank, WORLD, store, SLACK_S)
    dist.barrier()
    group = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT_S))
    model = Stack(3)
    shard_weights(model, group)
    stack_step(model, rank)

    def strike(*_: Any) -> None:
        if way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)

    if rank == WORLD - 1:
        hook: Any = model.layers[1]
        if way == "stuck":
            hook.register_forward_hook(strike)
        else:
            hook.register_full_backward_hook(strike)
    begin = time.monotonic()
    try:
        stack_step(model, rank)
    except PeerError as error:
        answers.put((rank, time.monotonic() - begin, str(error)))
        return
    answers.put((rank, time.monotonic() - begin, "finished, which it must not"))


@pytest.mark.parametrize("way", ["killed", "stuck"])
def test_when_a_rank_dies_in_a_step_the_others_raise_within_the_timeout(
    tmp_path: Path, way: str
) -> None:
    context = mp.get_context("spawn")
    answers: Any = context.Queue()
    arguments = (str(tmp_path / "store"), way, answers)
    processes = [
        context.Process(target=live_and_die, args=(rank, *arguments), daemon=True)
        for rank in range(WORLD)
    ]
    try:
        for process in processes:
            process.start()
        found = [answers.get(timeout=2 * SLACK_S) for _ in range(WORLD - 1)]
    finally:
        for process in processes:
            process.kill()
            process.join()
        answers.close()
    assert sorted(rank for rank, _, _ in found) == [0, 1]
    for _, seconds, words in found:
        assert "another one has gone or did not answer in time" in words
        assert "look at the output of the other ranks" in words
        assert seconds < 2 * TIMEOUT_S
