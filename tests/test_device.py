"""The machine is asked once, and what the launch variables say is checked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from backstash import device
from backstash.errors import BackstashError, ConfigError

LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    questions = (
        device.launch_environment,
        device.default_device,
        device.matrix_units,
        device.has_triton,
    )
    for name in LAUNCH:
        monkeypatch.delenv(name, raising=False)
    for question in questions:
        question.cache_clear()
    yield
    for question in questions:
        question.cache_clear()


def test_a_process_started_alone_is_rank_0_of_1() -> None:
    assert device.launch_environment() == device.LaunchEnvironment(
        rank=0, world_size=1, local_rank=0
    )


def test_the_launch_variables_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(LAUNCH, ("3", "4", "1"), strict=True):
        monkeypatch.setenv(name, value)
    expected = device.LaunchEnvironment(rank=3, world_size=4, local_rank=1)
    assert device.launch_environment() == expected
    monkeypatch.setenv("RANK", "2")
    assert device.launch_environment() == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "two"), ("RANK", "1"), ("RANK", "-1"), ("WORLD_SIZE", "0"), ("LOCAL_RANK", "1")],
)
def test_launch_variables_that_mean_nothing_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="torchrun"):
        device.launch_environment()


def test_a_cpu_has_no_matrix_units() -> None:
    assert device.matrix_units(torch.device("cpu")) == frozenset()


@pytest.mark.parametrize(
    ("capability", "units"),
    [
        ((8, 0), set()),
        ((8, 9), {"float8"}),
        ((9, 0), {"float8"}),
        ((10, 0), {"float8", "mxfp8", "nvfp4"}),
        ((12, 0), {"float8", "mxfp8", "nvfp4"}),
    ],
    ids=["8.0", "8.9", "9.0", "10.0", "12.0"],
)
def test_matrix_units_follow_the_compute_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], units: set[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert device.matrix_units(torch.device("cuda", 0)) == units


def test_each_process_of_a_launch_gets_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert device.default_device() == torch.device("cuda", 1)


def test_the_description_says_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = device.describe()
    assert torch.__version__ in text
    assert "units     none for a low-precision format" in text
    assert "kernels   PyTorch" in text


def test_mistakes_are_of_one_family() -> None:
    assert issubclass(ConfigError, BackstashError)
