"""What a layer knows of its rows is said for its own saving, not for everybody's."""

from __future__ import annotations

import pytest
import torch

import backstash as bs
from saving_cases import Declining, Keeper


def rows_seen(handler: Declining | Keeper) -> list[int | None]:
    return [None if rows is None else int(rows) for rows in handler.rows]


def test_another_node_saves_the_whole_of_a_layers_input() -> None:
    layer, x, scale = (
        bs.GroupedLinear(2, 8, 8, bias=False),
        torch.randn(6, 8),
        torch.randn(6, 8, requires_grad=True),
    )
    handler = Declining()
    with bs.saving(handler):
        layer(x, torch.tensor([3, 1]))
        seen_by_the_layer = len(handler.rows)
        torch.mul(x, scale)
    assert 4 in rows_seen(handler)[:seen_by_the_layer]
    assert rows_seen(handler)[seen_by_the_layer:] == [None]


@pytest.mark.parametrize("contexts", [1, 2])
def test_each_context_is_told_of_the_rows_once(contexts: int) -> None:
    layer, x = bs.GroupedLinear(2, 8, 8, bias=False), torch.randn(6, 8)
    outer, inner = Declining(), Declining()
    with bs.saving(outer):
        if contexts == 2:
            with bs.saving(inner):
                layer(x, torch.tensor([3, 1]))
        else:
            layer(x, torch.tensor([3, 1]))
    told = [outer, inner][:contexts]
    assert all(rows_seen(handler).count(4) == 1 for handler in told)


def test_what_foreign_hooks_save_leaves_no_mark_behind() -> None:
    layer, x, scale, handler = (
        bs.GroupedLinear(1, 8, 8),
        torch.randn(6, 8),
        torch.randn(6, 8, requires_grad=True),
        Declining(),
    )
    with torch.autograd.graph.save_on_cpu():
        layer(x, torch.tensor([2]))
    with bs.saving(handler):
        torch.mul(x, scale)
    assert rows_seen(handler) == [None]


def test_the_gradient_of_the_rows_a_layer_does_not_use_is_exact() -> None:
    class Forgetful(Keeper):
        """Keeps the valid rows only, as a stash does."""

        def pack(self, tensor: torch.Tensor, rows: torch.Tensor | None) -> list[torch.Tensor]:
            (kept,) = super().pack(tensor, rows)
            if rows is not None:
                kept[int(rows) :] = torch.nan
            return [kept]

    layer, x, scale = (
        bs.GroupedLinear(2, 8, 8),
        torch.randn(6, 8),
        torch.randn(6, 8, requires_grad=True),
    )
    with bs.saving(Forgetful()):
        y = layer(x, torch.tensor([3, 1])).sum() + (x * scale).sum()
    y.backward()
    assert scale.grad is not None
    assert layer.weight.grad is not None
    assert torch.equal(scale.grad, x)
    assert layer.weight.grad.isfinite().all()
