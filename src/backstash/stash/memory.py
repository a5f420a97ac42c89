"""The tensors of a pool, made together and replaced together."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from backstash import kernels
from backstash.device import default_device, has_triton
from backstash.errors import ConfigError, DeviceError
from backstash.stash.admission import Ledger

_MOST_PAGES = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Memory:
    """The bytes of both tiers, what is free, and the host's bound of what is not.

    Attributes:
        device_pages, host_pages: uint8; those of the host are pinned where there is a GPU.
        free_N: int32, the free pages of both tiers.
        state: int64, the counters.
        ledger: What the host knows.
    """

    device_pages: Tensor
    host_pages: Tensor
    free_N: Tensor
    state: Tensor
    ledger: Ledger

    @classmethod
    def allocate(
        cls, device_size: int, host_size: int, page_bytes: int, device: torch.device
    ) -> Memory:
        """Memory for so many pages in each tier.

        Raises:
            ConfigError: They are more than can be numbered.
        """
        if device_size + host_size > _MOST_PAGES:
            raise ConfigError(
                f"a pool has at most {_MOST_PAGES} pages, got {device_size} + {host_size}; "
                f"make page_bytes larger than {page_bytes}"
            )
        pinned = device.type == "cuda"
        free_N, state = kernels.new_pool_state(device_size, host_size, device)
        return cls(
            device_pages=torch.empty(device_size * page_bytes, dtype=torch.uint8, device=device),
            host_pages=torch.empty(
                host_size * page_bytes,
                dtype=torch.uint8,
                device="cpu",
                pin_memory=pinned and host_size > 0,
            ),
            free_N=free_N,
            state=state,
            ledger=Ledger(device_size, host_size, pinned=pinned),
        )


def pool_device(device: torch.device | str | None) -> torch.device:
    """The device with its number, as tensors on it say it; default the GPU if there is one.

    Raises:
        DeviceError: There are no kernels for it.
    """
    chosen = default_device() if device is None else torch.device(device)
    if chosen.type not in ("cpu", "cuda"):
        raise DeviceError(f"a pool is on a CPU or a CUDA GPU, got {chosen}; choose one of them")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            f"a pool on {chosen} needs a CUDA GPU, and PyTorch sees none; pass device='cpu' to try "
            "a stash without one"
        )
    if chosen.type == "cuda" and not has_triton():
        raise DeviceError("a pool on a GPU needs Triton, which is not there; install it")
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return chosen
