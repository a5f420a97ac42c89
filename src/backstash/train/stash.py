"""The stash of a run: a pool as the config says, and a gauge that is read once a step.

The pool follows what is needed unless the config fixes its bytes.  Where there may be no room
the host waits until the device has said what is really in use: a training step waits for its
loss anyway, and what it is short of is memory.
"""

from __future__ import annotations

import dataclasses
import weakref

import torch

from backstash.errors import ConfigError
from backstash.stash import PagePool, Policy, Sizing, Stash
from backstash.train.config import TrainConfig
from backstash.train.estimate import stash_bytes
from backstash.train.metrics import StashMetrics


def check_takes(config: TrainConfig) -> None:
    """Refuse a stash that would hold nothing.

    Raises:
        ConfigError: no buffer of a process is larger than a page.
    """
    if config.recompute == "none" and not stash_bytes(config):
        raise ConfigError(
            "a stash would take nothing: no buffer that the experts of a process save is larger "
            f"than a page of {config.stash_page_bytes} bytes; pass a smaller --stash-page-bytes, "
            "or leave --stash out"
        )


def open_stash(config: TrainConfig, device: torch.device, *, ranks: int = 1) -> Stash:
    """Return an empty stash on the device that the model is on, for one of ``ranks`` processes.

    Raises:
        ConfigError: it would take nothing, or its pages are more than can be numbered.
        DeviceError: there are no kernels for the device.
    """
    config = dataclasses.replace(config, batch=config.batch // ranks)
    check_takes(config)
    host_bytes, page_bytes = config.stash_host_bytes, config.stash_page_bytes
    if config.stash_bytes is not None:
        pool = PagePool(config.stash_bytes, host_bytes, device=device, page_bytes=page_bytes)
    else:
        pool = PagePool.auto(
            estimate_bytes=stash_bytes(config),
            host_bytes=host_bytes,
            device=device,
            page_bytes=page_bytes,
            sizing=Sizing(margin=pool_margin(config)),
        )
    return Stash(pool, policy=Policy.WAIT)


def pool_margin(config: TrainConfig) -> float:
    """Return by how much the pool is larger than the valid rows of all layers.

    A layer is let in if its buffers would fit with every row valid, and is then counted with
    the rows that there are.  So the last layer needs room for its rows that are not there.
    """
    spare = 0.0 if config.model.capacity_factor is None else config.model.capacity_factor - 1
    return 1.1 * (1 + spare / config.model.layers)


class StashGauge:
    """Reads a stash as numbers of one step, though its pool counts from when it was last resized.

    Reading waits for the device.
    """

    def __init__(self, stash: Stash) -> None:
        self._stash = stash
        self._high_bytes = 0
        self._spilled_pages = 0
        self._kept_bytes = 0
        # Weak, because a pool that grows lets its old memory go before it has the new.
        self._memory = weakref.ref(stash.pool.memory)

    def read(self) -> StashMetrics:
        """Return what is held now, and what has spilled or been kept since the last reading."""
        now, memory = self._stash.stats(), self._stash.pool.memory
        spilled_before = self._spilled_pages if self._memory() is memory else 0
        kept_before = self._kept_bytes
        high_bytes = (now.device_high + now.host_high) * now.page_bytes
        self._high_bytes = max(self._high_bytes, high_bytes)
        self._spilled_pages, self._kept_bytes = now.pages_spilled, now.bytes_kept
        self._memory = weakref.ref(memory)
        return StashMetrics(
            stash_pages_used=now.device_used + now.host_used,
            stash_fill=now.fill,
            stash_high_bytes=self._high_bytes,
            stash_spilled_bytes=(now.pages_spilled - spilled_before) * now.page_bytes,
            stash_kept_bytes=now.bytes_kept - kept_before,
        )
