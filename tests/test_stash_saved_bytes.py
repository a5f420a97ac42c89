"""What is kept for backward is the valid rows in whole slabs or pages, whatever the capacity is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import backstash as bs
from backstash.kernels.reference.slabs import SLAB_ROWS
from backstash.stash import PagePool, Stash
from stash_cases import PAGE, assert_nothing_is_held

TOKENS, HIDDEN, FFN, EXPERTS, TOP_K = 96, 32, 32, 8, 2


class Tower(nn.Module):
    """A few expert layers, each with a router of its own."""

    def __init__(self, layers: int, capacity_factor: float | None) -> None:
        super().__init__()
        torch.manual_seed(2)
        dispatcher = bs.Local(capacity_factor=capacity_factor)
        self.layers = nn.ModuleList(
            bs.MoE(HIDDEN, FFN, EXPERTS, TOP_K, dispatcher=dispatcher) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def automatic() -> Stash:
    return Stash(PagePool(1 << 22, device="cpu", page_bytes=PAGE))


def tokens() -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0))


def slab_pages(counts_E: Tensor) -> int:
    """Pages of one layer without a recipe: slabs of each expert's input and pre-activation."""
    slabs = sum(-(-count // SLAB_ROWS) for count in counts_E.tolist())
    return slabs * SLAB_ROWS * (HIDDEN + 2 * FFN) * 4 // PAGE


@pytest.mark.parametrize("layers", [1, 3, 6])
@pytest.mark.parametrize("factor", [1.5, 2.0, 4.0])
def test_pages_follow_the_valid_rows_and_not_the_capacity(layers: int, factor: float) -> None:
    stash, before, after = automatic(), bs.Meter(), bs.Meter()
    tower, routed = Tower(layers, factor), list[Tensor]()
    for layer in tower.layers:
        assert isinstance(layer, bs.MoE)
        layer.router.register_forward_hook(lambda *found: routed.append(found[-1].counts_E))
    with bs.saving(before, stash, after):
        y = tower(tokens().requires_grad_())
    assert len(routed) == layers
    assert stash.stats().device_used == sum(map(slab_pages, routed))
    # What the stash took was kept at full capacity before, and the rest is left.
    capacity = int(factor * TOKENS * TOP_K)
    assert before.bytes - after.bytes == layers * capacity * (HIDDEN + 2 * FFN) * 4
    y.sum().backward()
    del y
    assert_nothing_is_held(stash)


@pytest.mark.parametrize("recipe", bs.recipe_names())
def test_in_every_recipe_four_times_the_capacity_takes_no_page_more(recipe: str) -> None:
    used = []
    for factor in (1.0, 4.0):
        stash = automatic()
        with bs.autocast(recipe=recipe), bs.saving(stash):
            y = Tower(2, factor)(tokens().requires_grad_())
        used.append(stash.stats().device_used)
        del y
        assert_nothing_is_held(stash)
    assert used[0] == used[1] > 0


@pytest.mark.parametrize("factor", [None, 0.5, 1.0, 3.0], ids="capacity factor {}".format)
@pytest.mark.parametrize("recipe", ["high_precision", "mxfp8", "float8_delayed"])
def test_a_model_with_routers_has_the_same_gradients(recipe: str, factor: float | None) -> None:
    def gradients(*handlers: Stash) -> list[Tensor]:
        tower, x = Tower(3, factor), tokens().requires_grad_()
        with bs.autocast(recipe=recipe), bs.saving(*handlers):
            loss = tower(x).square().sum()
        loss.backward()
        assert x.grad is not None
        return [loss, x.grad, *(p.grad for p in tower.parameters() if p.grad is not None)]

    stash = automatic()
    for ours, theirs in zip(gradients(stash), gradients(), strict=True):
        assert torch.equal(ours, theirs)
    assert_nothing_is_held(stash)
