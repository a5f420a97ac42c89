"""What comes back is read in its pages where a node can, and copied for everybody else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import backstash as bs
from backstash import kernels
from backstash.errors import ModifiedError
from backstash.kernels import InPages, PagedRows
from backstash.stash import Policy, Stash
from backstash.stash.batch import Saved
from stash_cases import (
    BALANCED,
    CAPACITY,
    COUNTS,
    WIDTH,
    Copying,
    Experts,
    assert_nothing_is_held,
    stash,
    step,
)

LAYERS = 4
SLOTS = 2  # input and pre-activation


def saved(kept: Stash, *, rows: int = 20, **options: Any) -> tuple[Tensor, Saved]:
    """A buffer that is in pages, and its handle."""
    x = torch.randn(CAPACITY, WIDTH, **options)
    handle = kept.pack(x, torch.tensor([rows]))
    assert handle is not None
    kept.settle()
    return x, handle


def fits(paged: InPages) -> bool:
    return True


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_layers_read_all_that_they_saved_in_place_and_bit_for_bit(counts: tuple[int, ...]) -> None:
    experts, kept = Experts(LAYERS), stash()
    parameters = list(experts.parameters())
    expected = step(experts, parameters, counts)
    for turn in range(3):
        before = kept.stats()
        step(experts, parameters, counts, kept).assert_equal(expected)
        after = kept.stats()
        # Once a step has been seen the newest is not even stashed.
        read = SLOTS * (LAYERS - (turn > 0))
        assert after.in_place - before.in_place == read
        assert after.untouched - before.untouched == SLOTS * (turn > 0)
        if turn:
            assert after.bytes_restored == before.bytes_restored
    assert kept.stats().foreseen == kept.stats().surprises == 0
    assert_nothing_is_held(kept)


def test_what_is_read_in_place_is_the_same_again_in_a_retained_graph() -> None:
    experts, kept = Experts(2), stash()
    x = torch.randn(CAPACITY, WIDTH, requires_grad=True)
    with bs.saving(kept):
        loss = experts(x * 1.0)[:28].square().sum()
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first[:28], second[:28])
    assert kept.stats().in_place == 2 * 2 * SLOTS
    del loss
    assert_nothing_is_held(kept)


def test_pages_are_held_as_long_as_somebody_may_read_them() -> None:
    kept = stash()
    x, handle = saved(kept)
    paged = kept.read(handle, fits)
    assert isinstance(paged, PagedRows)
    del handle
    assert kept.stats().device_used > 0
    assert torch.equal(kernels.page_values(paged)[:20], x[:20])
    del paged
    assert_nothing_is_held(kept)


def test_a_node_that_cannot_read_it_gets_a_copy() -> None:
    kept = stash()
    x, handle = saved(kept)
    copy = kept.read(handle, lambda paged: False)
    assert isinstance(copy, Tensor)
    assert torch.equal(copy[:20], x[:20])
    assert kept.stats().in_place == 0


def test_an_original_that_is_still_there_is_given_as_it_is() -> None:
    kept, x = stash(), torch.randn(CAPACITY, WIDTH)
    handle = kept.pack(x, torch.tensor([20]))
    assert handle is not None
    value = kept.read(handle, fits)
    assert isinstance(value, Tensor)
    assert value.data_ptr() == x.data_ptr()
    x.add_(1)
    with pytest.raises(ModifiedError, match="modified in place"):
        kept.read(handle, fits)


def test_pages_in_host_memory_are_copied_back() -> None:
    kept = stash(8, 400)
    on_device, first = saved(kept, rows=2)
    on_host, second = saved(kept)
    assert kept.stats().host_used > 0
    for x, handle in ((on_device, first), (on_host, second)):
        value = kept.read(handle, fits)
        assert isinstance(value, Tensor)
        assert torch.equal(value[:2], x[:2])


def test_what_the_host_does_not_watch_is_read_in_place_where_all_pages_are_on_the_device() -> None:
    for host_pages in (0, 400):
        kept = stash(4096, host_pages)
        with kept.unattended():
            _, handle = saved(kept)
        assert isinstance(kept.read(handle, fits), PagedRows if host_pages == 0 else Tensor)


def test_an_overflow_reads_as_zeros() -> None:
    kept = stash(2)
    with kept.unattended():
        _, handle = saved(kept)
    paged = kept.read(handle, fits)
    assert isinstance(paged, PagedRows)
    assert not kernels.page_values(paged).any()


def test_compressed_values_and_parts_of_a_larger_buffer_are_copied_back() -> None:
    kept = stash(compress=bs.MXFP8)
    _, handle = saved(kept)
    assert isinstance(kept.read(handle, fits), Tensor)
    kept = stash()
    both = torch.randn(CAPACITY, 2 * WIDTH)
    handle = kept.pack(both[:, :WIDTH], torch.tensor([20]))
    assert handle is not None
    kept.settle()
    value = kept.read(handle, fits)
    assert isinstance(value, Tensor)
    assert torch.equal(value[:20], both[:20, :WIDTH])


def test_a_copy_made_ahead_is_dropped_when_the_pages_are_read_after_all() -> None:
    experts, kept = Experts(LAYERS), stash()
    parameters = list(experts.parameters())
    expected = step(experts, parameters)
    for handler in (Copying(kept), kept, Copying(kept), kept):
        step(experts, parameters, BALANCED, handler).assert_equal(expected)
    assert kept.stats().in_place > 0
    assert kept.stats().foreseen > 0
    assert_nothing_is_held(kept)


@pytest.mark.parametrize("policy", Policy, ids=lambda policy: policy.value)
@pytest.mark.parametrize(("pages", "host_pages"), [(40, 4096), (60, 0)], ids=str)
def test_with_too_few_pages_some_are_read_in_place_and_nothing_changes(
    pages: int, host_pages: int, policy: Policy
) -> None:
    experts, kept = Experts(LAYERS), stash(pages, host_pages, policy=policy)
    parameters = list(experts.parameters())
    expected = step(experts, parameters)
    for _ in range(3):
        step(experts, parameters, BALANCED, kept).assert_equal(expected)
    assert_nothing_is_held(kept)
