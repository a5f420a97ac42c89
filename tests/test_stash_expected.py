"""What a node announced is found again by what it saves."""

from __future__ import annotations

import threading

import torch

from backstash.stash import PagePool
from backstash.stash.batch import Batch
from backstash.stash.expected import Announced, Expected
from backstash.stash.region import content_of, region_of


def announced(tensor: torch.Tensor, batch: Batch | None) -> Announced:
    region = region_of(tensor, marked=False)
    assert region is not None
    return Announced(None, region, content_of(region, None, torch.uint8), batch)


def batch() -> Batch:
    return Batch(PagePool(1 << 12, device="cpu", page_bytes=256), 0, None)


def test_an_announcement_is_found_by_the_tensor_and_taken_once():
    expected, one, other = Expected(), torch.randn(4, 4), torch.randn(4, 4)
    entry = announced(one, batch())
    expected.announced.append(entry)
    assert expected.find(one, None) is entry
    assert expected.find(other, None) is None
    assert expected.is_waiting(entry.batch)  # pyright: ignore[reportArgumentType]
    assert expected.pop(entry.content) is entry
    assert expected.pop(entry.content) is None
    assert not expected.is_waiting(entry.batch)  # pyright: ignore[reportArgumentType]


def test_what_was_refused_is_known_as_long_as_the_node_saves():
    expected, entry = Expected(), announced(torch.randn(4, 4), None)
    expected.announced.append(entry)
    assert expected.pop(entry.content) is entry
    assert expected.pop(entry.content) is entry


def test_claims_of_a_node_that_saves_something_else_are_forgotten():
    expected, stand_in = Expected(), torch.empty(0, 4)
    key = stand_in.untyped_storage()._cdata
    expected.claimed[key] = stand_in, None  # pyright: ignore[reportArgumentType]
    assert expected.saves_claimed([torch.randn(3), stand_in])
    assert not expected.saves_claimed([torch.randn(3)])
    assert not expected.claimed


def test_each_thread_expects_what_its_own_node_announced():
    expected, found = Expected(), []
    expected.announced.append(announced(torch.randn(4, 4), None))
    thread = threading.Thread(target=lambda: found.append(len(expected.announced)))
    thread.start()
    thread.join()
    assert found == [0]
