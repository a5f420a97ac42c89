"""What this machine can run, asked once.

This file is the only reader of the environment: everything else is told, as an argument,
what it needs to know.  The answers cannot change while a process lives, so each question is
asked the first time somebody needs it and remembered.

A *matrix unit* is hardware that multiplies a low-precision format directly.  Which of them a
layer uses is decided in :mod:`backstash.nn.product`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from backstash.errors import ConfigError

# The first CUDA compute capability whose matrix units take each kind of operand.
FIRST_CAPABILITY: Mapping[str, tuple[int, int]] = {
    "float8": (8, 9),
    "mxfp8": (10, 0),
    "nvfp4": (10, 0),
}


@dataclass(frozen=True, kw_only=True)
class LaunchEnvironment:
    """Where this process stands among those that ``torchrun`` started together.

    A process started alone is rank 0 of 1.

    Raises:
        ConfigError: the three numbers cannot all be true.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.world_size and 0 <= self.local_rank < self.world_size):
            raise ConfigError(
                "the launch needs 0 <= RANK, LOCAL_RANK < WORLD_SIZE, got "
                f"RANK={self.rank}, LOCAL_RANK={self.local_rank}, WORLD_SIZE={self.world_size}; "
                "start the processes with torchrun, or unset all three to run alone"
            )


@functools.cache
def launch_environment() -> LaunchEnvironment:
    """Read ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK`` as ``torchrun`` sets them.

    Raises:
        ConfigError: one of them is no integer, or they contradict each other.
    """
    return LaunchEnvironment(
        rank=_environment_int("RANK", 0),
        world_size=_environment_int("WORLD_SIZE", 1),
        local_rank=_environment_int("LOCAL_RANK", 0),
    )


def _environment_int(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"the environment variable {name} has to be an integer, got {text!r}; "
            "start the processes with torchrun, or unset it to run alone"
        ) from None


@functools.cache
def default_device() -> torch.device:
    """Return this process's own GPU if there is one, else the CPU.

    Raises:
        ConfigError: the launch variables are not usable (see :func:`launch_environment`).
    """
    if torch.cuda.is_available():
        return torch.device("cuda", launch_environment().local_rank % torch.cuda.device_count())
    return torch.device("cpu")


@functools.cache
def matrix_units(device: torch.device) -> frozenset[str]:
    """Return the names of the formats that ``device`` multiplies directly.

    The names are the keys of :data:`FIRST_CAPABILITY`.  A CPU has none.
    """
    if device.type != "cuda":
        return frozenset()
    capability = torch.cuda.get_device_capability(device)
    return frozenset(name for name, first in FIRST_CAPABILITY.items() if capability >= first)


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of the GPU that a tensor says it is on."""
    # What a compiler traces is asked anew: it would guard what the dictionaries hold.
    if torch.compiler.is_compiling():
        return torch.cuda.get_device_capability(device)
    if device not in _CAPABILITIES:
        _CAPABILITIES[device] = torch.cuda.get_device_capability(device)
    return _CAPABILITIES[device]


def processor_count(device: torch.device) -> int:
    """Return how many programs that take all of a processor the GPU runs at a time."""
    if torch.compiler.is_compiling():
        return torch.cuda.get_device_properties(device).multi_processor_count
    if device not in _PROCESSORS:
        _PROCESSORS[device] = torch.cuda.get_device_properties(device).multi_processor_count
    return _PROCESSORS[device]


def current_gpu() -> int:
    """Return the number of the GPU that launches go to; there is one, or nobody asks."""
    return torch._C._cuda_getDevice()


def raw_stream(gpu: int) -> int:
    """Return CUDA's handle of the stream that launches on that GPU go to."""
    return torch._C._cuda_getCurrentRawStream(gpu)


# Asked at every launch, and what torch answers from costs microseconds.
_CAPABILITIES: dict[torch.device, tuple[int, int]] = {}
_PROCESSORS: dict[torch.device, int] = {}


@functools.cache
def has_triton() -> bool:
    """Return whether Triton kernels can run: the package is there and so is a GPU for it."""
    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


def installed_version() -> str:
    """The version of this package, or that it runs without being installed."""
    try:
        return importlib.metadata.version("backstash")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def describe() -> str:
    """Describe the machine in a few lines: versions, device, and what hardware is there."""
    device = default_device()
    launch = launch_environment()
    units = ", ".join(sorted(matrix_units(device))) or "none for a low-precision format"
    lines = {
        "backstash": installed_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device_name(device),
        "launch": f"rank {launch.rank} of {launch.world_size}",
        "triton": "usable" if has_triton() else "not usable here",
        "units": units,
        "kernels": "Triton" if has_triton() else "PyTorch",
    }
    return "\n".join(f"{name:<9} {what}" for name, what in lines.items())


@functools.cache
def device_name(device: torch.device) -> str:
    """Return a name for ``device`` that a person recognises in a table of results."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"
    return f"{_cpu_model() or platform.machine()}, {os.cpu_count()} cores"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""  # another system than Linux
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "")
