"""What was dropped waits for company, unless a graph is recorded, and is taken once."""

from __future__ import annotations

import torch

import backstash as bs
from backstash import kernels
from backstash.kernels import MOST_RELEASED
from backstash.stash.admission import Account
from backstash.stash.dropped import Dropped
from backstash.stash.launch import Launch
from stash_cases import assert_nothing_is_held, pool, scale


def launch(memory: bs.PagePool, *, captured: bool = False) -> Launch:
    return Launch(
        table=torch.zeros(4, dtype=torch.int64),
        buffers=1,
        account=None,
        done=None,
        captured=captured,
        memory=memory.memory,
    )


def test_a_few_are_due_at_once_and_one_of_a_graph_is() -> None:
    memory, dropped = pool(), Dropped()
    for count in range(1, MOST_RELEASED + 1):
        dropped.add(launch(memory))
        assert dropped.is_due() == (count == MOST_RELEASED)
    dropped = Dropped()
    dropped.add(launch(memory, captured=True))
    assert dropped.is_due()


def test_a_graph_takes_what_it_recorded_and_nothing_else() -> None:
    memory, dropped = pool(), Dropped()
    plain, recorded = launch(memory), launch(memory, captured=True)
    reserved = Account(3, 1, is_on_device=True)
    for held in (plain, recorded, reserved):
        dropped.add(held)
    assert dropped.has_some(capturing=True)
    assert dropped.take(capturing=True) == [recorded]
    assert not dropped.has_some(capturing=True)
    assert dropped.take(capturing=False) == [plain, reserved]
    assert len(dropped) == 0


def test_what_a_graph_recorded_that_never_runs_is_forgotten() -> None:
    memory, dropped = pool(), Dropped()
    plain = launch(memory)
    for held in (plain, launch(memory, captured=True)):
        dropped.add(held)
    dropped.forget_captured()
    assert dropped.take(capturing=False) == [plain]


def test_batches_of_a_backward_are_given_back_in_few_launches(monkeypatch) -> None:
    given: list[int] = []
    release = kernels.release_pages

    def release_pages(tables, *rest, **key) -> None:
        given.append(len(tables))
        release(tables, *rest, **key)

    monkeypatch.setattr(kernels, "release_pages", release_pages)
    memory = pool()
    stash = bs.Stash(memory)
    layers = 2 * MOST_RELEASED + 3
    with bs.saving(stash):
        y = torch.randn(48, 32, requires_grad=True)
        for _ in range(layers):
            y = scale(y, 40)
    y.sum().backward()
    del y
    assert given == [MOST_RELEASED] * 2
    # The rest goes before anything is taken again, or when somebody asks.
    assert_nothing_is_held(stash)
    assert given == [MOST_RELEASED] * 2 + [3]
