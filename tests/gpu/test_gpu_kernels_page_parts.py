"""Parts of buffers on a GPU: bytes and values in one launch, whole parts and their rests."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backstash.kernels import PoolState
from backstash.kernels.reference import pages as reference
from pages_cases import Pool, gpu_pool

pytestmark = pytest.mark.gpu

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float16]
WIDTHS = [48, 33, 96, 1]
CAPACITY = 3000


def sources(shift: int = 0) -> list[Tensor]:
    """A buffer of each dtype; ``shift`` elements from where memory was given."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for dtype, width in zip(DTYPES, WIDTHS, strict=True):
        count = CAPACITY * width + shift
        x = torch.randn(count, generator=generator) * torch.randn(count, generator=generator).exp()
        if dtype is torch.uint8:
            x = torch.randint(0, 0xA0, (count,), generator=generator)
        found.append(x.to(dtype)[shift:])
    return found


@pytest.mark.parametrize("shift", [0, 1, 8])
@pytest.mark.parametrize("page", [64, 4096, 65536])
@pytest.mark.parametrize("rows", [0, 1, 31, 1000, CAPACITY])
def test_bytes_and_values_of_one_launch_are_those_of_the_reference(
    rows: int, page: int, shift: int
) -> None:
    found, pages = [], 30_000 * 64 // page + 100
    for pool in (Pool(0, pages, page, reference), gpu_pool(0, pages, page)):
        device = str(pool.device)
        given = [source.to(device) for source in sources(shift)]
        if shift and device != "cpu":
            # A copy to the device is aligned again.
            given = [torch.cat([x[:shift], x])[shift:] for x in given]
        counts = [torch.tensor([rows], device=device)] * len(given)
        held = pool.stash(given, counts, WIDTHS)
        restored = pool.restore(held)
        counters = [pool.counter(place) for place in PoolState]
        found.append(([x.cpu() for x in restored], held.table[:11].tolist(), counters))
        pool.release(held)
    (wanted, table, counters), (got, gpu_table, gpu_counters) = found
    assert (table, counters) == (gpu_table, gpu_counters)
    for one, other in zip(wanted, got, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rows", [1, 1000])
def test_without_room_values_and_bytes_come_back_as_zeros(rows: int) -> None:
    pool = gpu_pool(1, 0, 64)
    given = [source.cuda() for source in sources()]
    held = pool.stash(given, [torch.tensor([rows], device="cuda")] * len(given), WIDTHS)
    assert pool.counter(PoolState.OVERFLOWS) == 1
    for restored, width in zip(pool.restore(held), WIDTHS, strict=True):
        assert (restored[: rows * width] == 0).all()
        assert (restored[rows * width :] == 0xAB).all()
