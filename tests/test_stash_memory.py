"""A pool's tensors are made together: bytes for each tier, and every page free."""

from __future__ import annotations

import pytest
import torch

from backstash.errors import ConfigError, DeviceError
from backstash.kernels import PoolState
from backstash.stash.memory import Memory, pool_device

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


def test_a_gpu_that_is_not_there_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"cuda:1 needs a CUDA GPU.*sees none; pass device='cpu'"):
        pool_device("cuda:1")
    with pytest.raises(DeviceError, match="on a CPU or a CUDA GPU, got meta"):
        pool_device("meta")
    assert pool_device(None) == CPU
