"""Rows are gathered from tokens, or copied from them into a buffer: the same sums."""

from __future__ import annotations

import pytest
import torch

from backstash import kernels
from backstash.nn import GroupedMLP, RowMap
from backstash.saving import Meter, saving

E, H, I, T, K = 3, 8, 16, 20, 2  # noqa: E741


def operands() -> tuple[GroupedMLP, torch.Tensor, torch.Tensor, RowMap, torch.Tensor]:
    torch.manual_seed(0)
    experts = GroupedMLP(E, H, I, dtype=torch.float64)
    x = torch.randn(T, H, dtype=torch.float64, requires_grad=True)
    expert_TK = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    source, slots, counts = kernels.sort_by_expert(expert_TK, E)
    return experts, x, torch.rand(T * K, dtype=torch.float64), RowMap(source, slots), counts


def gradients(y: torch.Tensor, x: torch.Tensor, experts: GroupedMLP) -> list[torch.Tensor]:
    dy = torch.arange(y.numel(), dtype=y.dtype).sin().view_as(y)
    return [y.detach(), *torch.autograd.grad(y, [x, *experts.parameters()], dy)]


@pytest.mark.parametrize("combined", [False, True], ids=["rows", "combined"])
def test_a_buffer_that_is_filled_gives_what_gathered_tokens_give(combined: bool) -> None:
    experts, x, prob, rows, counts = operands()
    wanted = gradients(experts(x, counts, prob, rows=rows, combined=combined), x, experts)
    valid = counts.sum().view(1).int()
    filled = RowMap(rows.source_R, rows.slots_TK, valid)
    found = gradients(experts(x, counts, prob, rows=filled, combined=combined), x, experts)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_of_a_buffer_the_rows_are_saved_and_not_the_tokens() -> None:
    experts, x, prob, rows, counts = operands()
    filled = RowMap(rows.source_R, rows.slots_TK, counts.sum().view(1).int())
    sizes = []
    for one in (rows, filled):
        with saving(meter := Meter()):
            experts(x, counts, prob, rows=one)
        sizes.append(meter.bytes)
    # Gathering needs the sources in backward, filling the number of rows.
    assert sizes[1] - sizes[0] == (T * K - T) * H * 8 - T * K * 8 + 4


def test_rows_of_a_buffer_that_are_not_there_change_nothing() -> None:
    experts, x, prob, rows, counts = operands()
    few = counts.clone()
    few[-1] = 2  # the last expert's other rows did not fit
    valid, there = few.sum().view(1).int(), int(few.sum())
    filled = RowMap(rows.source_R, rows.slots_TK, valid)
    y = experts(x, few, prob, rows=filled)
    assert not y[there:].any()
    dy = torch.ones_like(y)
    inputs = [x, *experts.parameters()]
    clean = torch.autograd.grad(y, inputs, dy, retain_graph=True)
    dy[there:] = float("nan")
    for one, other in zip(clean, torch.autograd.grad(y, inputs, dy), strict=True):
        assert torch.equal(one, other)
