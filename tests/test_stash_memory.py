"""A pool's tensors are made together: bytes for each tier, and every page free."""

from __future__ import annotations

import pytest
import torch

from backstash.errors import ConfigError
from backstash.kernels import PoolState
from backstash.stash.memory import Memory

CPU = torch.device("cpu")


@pytest.mark.parametrize(("device", "host"), [(0, 0), (3, 0), (0, 2), (3, 2)])
def test_every_page_is_free_at_first(device: int, host: int) -> None:
    memory = Memory.allocate(device, host, 64, CPU)
    assert memory.device_pages.numel() == 64 * device
    assert memory.host_pages.numel() == 64 * host
    assert memory.free_N.tolist() == list(range(device + host))
    assert memory.state[PoolState.TAIL_DEVICE] == device
    assert memory.state[PoolState.TAIL_HOST] == host
    assert int(memory.state.sum()) == device + host
    assert memory.ledger.bound == 0


def test_more_pages_than_can_be_numbered_are_refused() -> None:
    with pytest.raises(ConfigError, match="make page_bytes larger than 16"):
        Memory.allocate(2**31, 0, 16, CPU)
