"""A batch goes from its originals into pages, and its bytes can be asked for at any time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backstash.errors import ModifiedError
from backstash.stash import Policy
from backstash.stash.batch import Batch, BatchState, Kept
from backstash.stash.pool import PagePool
from backstash.stash.region import region_of
from stash_cases import assert_nothing_is_held, pool


def batch_of(memory: PagePool, *tensors: Tensor) -> tuple[Batch, list[Kept]]:
    with memory.turn():
        worst = memory.pages_of([(t.nbytes, torch.uint8) for t in tensors])
        account, _ = memory.admit(worst, Policy.SPILL)
    batch = Batch(memory, 0, account)
    kept = []
    for tensor in tensors:
        region = region_of(tensor, marked=True)
        assert region is not None
        kept.append(batch.add(region, torch.tensor([3]), tensor))
    return batch, kept


def test_the_originals_are_there_until_the_copies_have_landed() -> None:
    memory, x, y = pool(), torch.randn(10, 64), torch.randn(5, 64)
    batch, kept = batch_of(memory, x, y)
    assert [k.slot for k in kept] == batch.unshared == [0, 1]
    assert batch.state is BatchState.OPEN
    assert batch.original(1) is not None
    with memory.turn():
        batch.close(is_sent=True)
        batch.send()
    assert batch.state is BatchState.COPYING
    assert batch.original(1) is not None
    with memory.turn():
        batch.land()
    assert batch.state is BatchState.PAGED
    assert batch.original(1) is None
    del batch, kept
    assert_nothing_is_held(memory)


@pytest.mark.parametrize("sent", [False, True], ids=["reserved", "sent"])
def test_a_batch_that_goes_gives_back_what_it_reserved(sent: bool) -> None:
    memory = pool()
    batch, kept = batch_of(memory, torch.randn(10, 64))
    if sent:
        with memory.turn():
            batch.close(is_sent=True)
            batch.send()
    assert not memory.is_empty()
    del batch, kept
    assert_nothing_is_held(memory)


@pytest.mark.parametrize("landed", [False, True], ids=["copying", "landed after"])
def test_a_change_before_the_copy_has_landed_is_noticed(landed: bool) -> None:
    memory, x = pool(), torch.randn(10, 64)
    batch, _ = batch_of(memory, x)
    with memory.turn():
        batch.close(is_sent=True)
        batch.send()
    x.add_(1)
    if landed:
        with memory.turn():
            batch.land()
    with pytest.raises(ModifiedError, match="while it was being stashed"):
        batch.original(0)


def test_a_change_after_the_copy_has_landed_does_not_matter() -> None:
    memory, x = pool(), torch.randn(10, 64)
    batch, _ = batch_of(memory, x)
    with memory.turn():
        batch.close(is_sent=True)
        batch.send()
        batch.land()
    x.add_(1)
    assert batch.original(0) is None
