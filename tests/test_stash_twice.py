"""The same bytes saved twice: as other values, or with another number of valid rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import backstash as bs
from backstash import PagePool, Stash
from backstash.stash import Take
from stash_cases import assert_nothing_is_held

ROWS, WIDTH, PAGE = 64, 32, 256
RESTORED: list[list[Tensor]] = []


class _Saving(torch.autograd.Function):
    """Saves what it is given; a number beside a tensor marks so many rows for this node alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *values: Any) -> Tensor:
        bs.save_for_backward(ctx, *values)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        values = bs.saved_values(ctx)
        RESTORED.append(
            [v.data.clone() if isinstance(v, bs.GroupedTensor) else v.clone() for v in values]
        )
        return (dy.expand(3), *[None] * len(values))


@pytest.fixture(autouse=True)
def nothing_restored() -> None:
    RESTORED.clear()


def saved(stash: Stash, *nodes: list[Any]) -> list[list[Tensor]]:
    """What backward of each node gets, long after the originals are gone."""
    x = torch.ones(3, requires_grad=True)
    with bs.saving(stash):
        losses = [_Saving.apply(x, *values) for values in nodes]
    stash.settle()
    for loss in losses:
        loss.backward()
    return RESTORED


@pytest.mark.parametrize("order", [1, -1])
def test_a_node_that_saves_bytes_as_two_dtypes_reserves_pages_for_both(order: int) -> None:
    stash = Stash(PagePool(2**20, device="cpu", page_bytes=PAGE), compress=bs.MXFP8)
    values = torch.randn(ROWS, WIDTH)
    bs.mark_grouped_tensor(values, torch.tensor([ROWS]))
    both = [values, values.view(torch.int32)][::order]
    asked: list[int] = []
    admit = stash.pool.admit
    stash.pool.admit = lambda worst, policy: asked.append(worst) or admit(worst, policy)
    (restored,) = saved(stash, both)
    assert stash.stats().device_high == sum(asked)
    wanted = bs.MXFP8.quantize(values).dequantize()
    for one, dtype in zip(restored, [x.dtype for x in both], strict=True):
        assert torch.equal(one, wanted if dtype is torch.float32 else values.view(torch.int32))
    assert stash.stats().batches == 1
    assert_nothing_is_held(stash)


@pytest.mark.parametrize("counts", [(5, 50), (50, 5), (5, None), (None, 5)], ids=str)
def test_each_node_gets_as_many_rows_as_it_saved(counts: tuple[int | None, int | None]) -> None:
    stash = Stash(PagePool(2**20, device="cpu", page_bytes=PAGE), take=Take.ALL)
    values = torch.randn(ROWS, WIDTH)
    nodes = [
        [values if n is None else bs.GroupedTensor(values, torch.tensor([n]), capacity=ROWS)]
        for n in counts
    ]
    for n, (restored,) in zip(counts, saved(stash, *nodes), strict=True):
        assert torch.equal(restored[:n], values[:n])
    del nodes
    assert_nothing_is_held(stash)


def test_what_was_taken_whole_is_not_taken_again_with_fewer_rows() -> None:
    stash = Stash(PagePool(2**20, device="cpu", page_bytes=PAGE), take=Take.ALL)
    values = torch.randn(ROWS, WIDTH)
    saved(stash, [values], [bs.GroupedTensor(values, torch.tensor([5]), capacity=ROWS)])
    assert stash.stats().batches == 1
    assert stash.stats().bytes_stashed == values.nbytes


def test_the_same_rows_of_two_nodes_are_taken_once() -> None:
    stash = Stash(PagePool(2**20, device="cpu", page_bytes=PAGE))
    grouped = bs.GroupedTensor(torch.randn(ROWS, WIDTH), torch.tensor([5]), capacity=ROWS)
    saved(stash, [grouped], [grouped])
    assert stash.stats().bytes_stashed == 5 * WIDTH * 4
