"""Several processes that train one model, each on its part of every batch.

A *rank* is one of the processes that ``torchrun`` started; alone, a process is rank 0 of 1.
All ranks draw the same batch and each takes its own sequences of it, so what is learned from
does not depend on how many they are.  Weights are sharded
(:func:`~backstash.weights.shard_weights`), gradients and losses averaged, loads of experts
added up.  The first rank speaks for all: only it prints, and only it writes files.

Ranks must never differ in what they do next, or some would wait for ever.  So whatever could
differ is asked of all of them: whether to stop (:meth:`Ranks.on_any`), and whether what the first
one wrote is written (:meth:`Ranks.first_does`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from backstash.device import default_device, launch_environment
from backstash.errors import BackstashError, ConfigError, DeviceError, PeerError
from backstash.formats import Float8Delayed
from backstash.recipes import Recipe
from backstash.train.config import TrainConfig
from backstash.train.shards import Shards
from backstash.weights import ShardOptions, shard_weights, sharded_weights

if TYPE_CHECKING:
    from backstash.train.metrics import Record

_TIMEOUT = datetime.timedelta(minutes=10)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Where this process stands among those that train one model.

    Attributes:
        rank: the number of this one.
        size: how many there are.
        group: the ranks, or ``None`` where a process is alone.
        counting: the same ranks again, for the loads of experts and for largest magnitudes.  They
            are brought together between the matmuls, and a rank that failed there answers in
            ``group`` only.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    counting: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup, counting: dist.ProcessGroup) -> Ranks:
        """The ranks of a process group, which have two of them."""
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        return cls(rank=rank, size=size, group=group, counting=counting)

    @property
    def is_first(self) -> bool:
        """Whether this one speaks for all."""
        return self.rank == 0

    def check(self, config: TrainConfig) -> None:
        """Raise :class:`ConfigError` unless these ranks can train as the config says."""
        if config.batch % self.size:
            raise ConfigError(
                f"batch has to be a multiple of the {self.size} ranks, each of which takes an "
                f"equal part of it, got {config.batch}; pass --batch "
                f"{-(-config.batch // self.size) * self.size}"
            )

    def share_scales(self, formats: Recipe) -> Recipe:
        """Return the recipe that learns its scales, if it does, from the tensors of all ranks."""
        shared = {
            operand: dataclasses.replace(format, amax_group=self.counting)
            for operand in ("input", "gradient")
            if isinstance(format := getattr(formats, operand), Float8Delayed)
        }
        return dataclasses.replace(formats, **shared)

    def part(self, batch: int) -> slice:
        """Which sequences of a batch are this rank's."""
        each = batch // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def shard(self, model: nn.Module) -> Shards:
        """Leave this rank its part of the weights, in place."""
        if self.group is None:
            return Shards()
        # Added up in the order of the ranks, whatever the dtype and the backend.
        shard_weights(model, self.group, options=ShardOptions(accumulate=torch.float32))
        return Shards(sharded_weights(model))

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean over the ranks; alone, the very tensor."""
        return x if self.group is None else self.total(x) / self.size

    def total(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks; alone, the very tensor."""
        if self.group is None:
            return x
        x = x.clone()
        dist.all_reduce(x, group=self.group)
        return x

    def on_any(self, *, flag: bool) -> bool:
        """Return whether the flag is set on any rank; the same on all."""
        return flag if self.group is None else bool(self.total(torch.tensor(int(flag))))

    def first_does(self, write: Callable[[], Any]) -> None:
        """Let the first rank do something while the others wait; if it fails, all raise.

        Raises:
            PeerError: the first rank failed, and this is another one.
        """
        failure: Exception | None = None
        if self.is_first:
            try:
                write()
            except Exception as error:  # whatever it is, the others wait for an answer
                failure = error
        failed = self.on_any(flag=failure is not None)
        if failure is not None:
            raise failure
        if failed:
            raise PeerError("rank 0 could not write the files of the run; see its output")


class Silence:
    """Output and log of a run that shows nothing, such as that of any rank but the first."""

    def say(self, text: str) -> None:
        """Say nothing."""

    def progress(self, record: Record) -> None:
        """Show nothing."""

    def write(self, record: Record) -> None:
        """Write nothing."""

    def close(self) -> None:
        """Nothing is open."""


@contextlib.contextmanager
def open_ranks(config: TrainConfig) -> Iterator[Ranks]:
    """Find the other processes, for as long as the context lasts.

    One process alone has all weights anyway and needs no group, so a run of several goes on
    in one as it stands.

    Raises:
        ConfigError: several processes were started without ``shard_weights``, or they cannot
            share the batch or the device that the config names.
        DeviceError: there are fewer GPUs here than processes.
        PeerError: another process failed or is gone.
    """
    world = launch_environment().world_size
    if world == 1:
        yield Ranks()
        return
    if not config.shard_weights:
        raise ConfigError(
            f"torchrun started {world} processes, and each would train the same run; pass "
            "--shard-weights to train one model on all of them, or start a single process"
        )
    if dist.is_initialized():
        raise ConfigError(
            "the processes of a run make their own process group, and there is one already; call "
            "torch.distributed.destroy_process_group() first"
        )
    device = own_device(config.device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with naming_peers():
        dist.init_process_group(backend, timeout=_TIMEOUT)
        # Untyped in torch: for all ranks it is a group.
        counting: Any = dist.new_group(timeout=_TIMEOUT)
        ranks = Ranks.of(dist.distributed_c10d._get_default_group(), counting)
        ranks.check(config)
        yield ranks
    # Not after an exception: what is on its way to ranks that have gone would be waited for.
    dist.destroy_process_group()


@contextlib.contextmanager
def naming_peers() -> Iterator[None]:
    """Raise :class:`PeerError` where a collective failed, which it does for want of a peer."""
    try:
        yield
    except BackstashError:
        raise
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or "gloo" in str(error).lower()):
            raise
        raise PeerError(
            f"another rank of this run has gone or did not answer in time ({error}); look at the "
            "output of the other ranks, and start all again with --resume"
        ) from error


def own_device(name: str) -> torch.device:
    """Return the device of this one of several ranks.

    Raises:
        ConfigError: the config names one GPU for all of them.
        DeviceError: there are fewer GPUs here than ranks.
    """
    if name.startswith("cuda:"):
        raise ConfigError(
            f"device has to be auto, cpu or cuda where several processes train, got {name}, "
            "which is one GPU for all of them; pass --device cuda and each takes its own"
        )
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    local_rank = launch_environment().local_rank
    if local_rank >= torch.cuda.device_count():
        raise DeviceError(
            f"each process needs a GPU of its own, and PyTorch sees {torch.cuda.device_count()} "
            f"for process {local_rank + 1} of this machine; pass --device cpu, or start fewer"
        )
    return default_device()
