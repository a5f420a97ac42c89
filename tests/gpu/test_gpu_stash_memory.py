"""Memory on a GPU grows by the valid rows of a layer, not by all that there is room for."""

from __future__ import annotations

import gc

import pytest
import torch

import backstash as bs
from backstash.stash import PagePool, Stash, pages_for
from stash_cases import assert_nothing_is_held
from stash_gpu_cases import CAPACITY, EXPERTS, GPU, WIDTH, Layers

pytestmark = pytest.mark.gpu

PAGE = 16384
SHALLOW, DEEP = 4, 36
#: What the allocator rounds up, and small tensors.
WITHIN = 0.03


def peak_bytes(layers: int, rows: int, stash: Stash | None) -> int:
    """The most that a step holds at once; of a pool, the pages that were ever in use."""
    model = Layers(layers)
    counts = torch.full((EXPERTS,), rows // EXPERTS, dtype=torch.int32, device=GPU)
    x = torch.randn(CAPACITY, WIDTH, device=GPU, dtype=torch.bfloat16)
    for _ in range(2):
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with bs.saving(*(() if stash is None else (stash,))):
            loss = model(x.requires_grad_(), counts)[:rows].float().square().sum()
        loss.backward()
        del loss
        torch.cuda.synchronize()
    held = 0
    if stash is not None:
        held = (stash.stats().device_high - stash.pool.device_size) * PAGE
    return torch.cuda.max_memory_allocated() + held


@pytest.mark.parametrize("rows", [0, 512, 2048])
def test_deeper_models_need_the_valid_rows_of_more_layers_and_not_their_room(rows: int) -> None:
    grown = []
    for is_stashed in (False, True):
        peaks = []
        for layers in (SHALLOW, DEEP):
            before = torch.cuda.memory_allocated()
            stash = Stash(PagePool(2**28, device=GPU, page_bytes=PAGE)) if is_stashed else None
            peaks.append(peak_bytes(layers, rows, stash) - before)
            if stash is not None:
                assert_nothing_is_held(stash)
            del stash
            gc.collect()
        grown.append(peaks[1] - peaks[0])
    # Of each layer the input and the pre-activation, in bfloat16.
    row_bytes = 2 * WIDTH
    room = 2 * CAPACITY * row_bytes
    valid = pages_for([(rows, row_bytes)] * 2, PAGE) * PAGE
    saved = (DEEP - SHALLOW) * (room - valid)
    assert grown[0] - grown[1] == pytest.approx(saved, rel=WITHIN)
