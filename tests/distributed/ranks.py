"""Processes that talk over gloo, started once and given many checks to run.

To start a process costs seconds, so the four of a session stay and each test sends them a
function.  A check of two or three ranks runs on the first of them, in a group of its own.
Nothing hangs: a collective gives up after ``COLLECTIVE_S``, and processes that have not
answered after ``ANSWER_S``, or ``REST_S`` after one of them has failed, are killed and started
anew for the next test.
"""

from __future__ import annotations

import datetime
import os
import random
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 4
COLLECTIVE_S = 20
ANSWER_S = 90
#: Those that wait for one that has failed would wait for all of ``COLLECTIVE_S``; in this time
#: those answer that have failed themselves.
REST_S = 1


class Ranks:
    """A pool of processes, each a rank."""

    def __init__(self, folder: Path, world: int = WORLD) -> None:
        self._folder = folder
        self._world = world
        self._starts = 0
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, check: Callable[..., Any], *args: Any, size: int = 2) -> list[Any]:
        """What ``check(group, *args)`` returns on each of the first ``size`` ranks."""
        if not self._processes:
            self._start()
        for pipe in self._pipes[:size]:
            pipe.send((check, args, size))
        answers = self._answers(self._pipes[:size])
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failures:
            self.stop()
            raise AssertionError("\n".join(failures))
        return [value for _, value in answers]

    def stop(self) -> None:
        """Kill the processes; the next run starts new ones."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._starts += 1
        store = str(self._folder / f"store{self._starts}")
        for rank in range(self._world):
            ours, theirs = context.Pipe()
            arguments = (rank, self._world, store, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _answers(self, pipes: list[Connection]) -> list[tuple[bool, Any]]:
        """Whether each process came to its end, and what it gave or how it failed."""
        answers: dict[Connection, tuple[bool, Any]] = {}
        seconds: float = ANSWER_S
        until = time.monotonic() + seconds
        while len(answers) < len(pipes):
            left = [pipe for pipe in pipes if pipe not in answers]
            came = wait(left, until - time.monotonic())
            if not came:
                answers |= dict.fromkeys(left, (False, f"no answer within {seconds:g} seconds"))
            for pipe in came:
                answers[pipe] = self._answer(pipe)  # pyright: ignore[reportArgumentType]
            if seconds > REST_S and not all(ok for ok, _ in answers.values()):
                seconds = REST_S
                until = time.monotonic() + seconds
        return [answers[pipe] for pipe in pipes]

    def _answer(self, pipe: Connection) -> tuple[bool, Any]:
        try:
            return pipe.recv()
        except EOFError:
            return False, "the process has gone"


def join_world(rank: int, world: int, store: str, timeout_s: float) -> None:
    """What every process does first."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def _serve(rank: int, world: int, store: str, pipe: Connection) -> None:
    warnings.simplefilter("error")
    join_world(rank, world, store, COLLECTIVE_S)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore
    groups = {size: dist.new_group(list(range(size))) for size in range(1, world + 1)}
    while True:
        try:
            check, args, size = pipe.recv()
        except EOFError:
            return
        random.seed(0)
        torch.manual_seed(0)
        try:
            answer = True, check(groups[size], *args)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)
