"""Streams that share weights: what is ordered before what, and which memory is marked."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from backstash.formats import MXFP8
from backstash.weights.home import Home

HOME, AWAY = "home", "away"
GPU = torch.device("cuda", 0)


class Lane:
    """A stream that writes down whom it waits for."""

    device = GPU

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self._log = log

    def wait_stream(self, other: Lane) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


class Buffer:
    """A tensor on a GPU, as far as it is asked here."""

    def __init__(self, name: str, log: list[str], device: torch.device = GPU) -> None:
        self.name = name
        self.device = device
        self._log = log

    def record_stream(self, stream: Lane) -> None:
        self._log.append(f"{self.name} is used {stream.name}")


class Gpu:
    """Streams of a GPU that is not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.lanes = {name: Lane(name, self.log) for name in (HOME, AWAY)}
        self.now = HOME
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.lanes[self.now])
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        self.home = Home()
        self.home.settle(GPU)

    @contextlib.contextmanager
    def on(self, lane: Lane) -> Any:
        before, self.now = self.now, lane.name
        yield
        self.now = before

    def buffer(self, name: str, device: torch.device = GPU) -> Any:
        return Buffer(name, self.log, device)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_who_works_elsewhere_is_waited_for_and_waits(gpu: Gpu) -> None:
    gpu.now = AWAY
    with gpu.home.visit() as visit:
        assert gpu.now == HOME
        visit.bring([gpu.buffer("gradient"), None])
        visit.take([gpu.buffer("weight")])
    assert gpu.now == AWAY
    assert gpu.log == [
        "home waits for away",
        "gradient is used home",
        "weight is used away",
        "away waits for home",
    ]


def test_memory_of_another_device_has_nothing_to_do_with_these_streams(gpu: Gpu) -> None:
    gpu.now = AWAY
    with gpu.home.visit() as visit:
        visit.take([gpu.buffer("weight", torch.device("cuda", 1)), torch.ones(1)])
    assert gpu.log == ["home waits for away", "away waits for home"]


def test_at_home_nothing_is_done(gpu: Gpu) -> None:
    with gpu.home.visit() as visit:
        visit.take(visit.bring([gpu.buffer("weight")]))
    assert gpu.log == []


def test_an_error_at_home_leaves_the_visitor_where_he_was(gpu: Gpu) -> None:
    gpu.now = AWAY
    with pytest.raises(ValueError, match="gone"), gpu.home.visit():
        raise ValueError("gone")
    assert gpu.log == ["home waits for away", "away waits for home"]


def test_each_buffer_of_a_quantized_weight_is_marked(gpu: Gpu) -> None:
    weight = MXFP8.quantize(torch.ones(32, 32))
    names = list(weight.buffers)
    buffers = {name: gpu.buffer(name) for name in names}
    gpu.now = AWAY
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(weight), "buffers", property(lambda self: buffers))
        with gpu.home.visit() as visit:
            visit.take([weight])
    assert gpu.log[1:-1] == [f"{name} is used away" for name in names]


def test_a_cpu_has_no_streams() -> None:
    home = Home()
    home.settle(torch.device("cpu"))
    with home.visit() as visit:
        assert visit.take([None]) == [None]
