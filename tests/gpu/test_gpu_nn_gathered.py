"""On a GPU pieces, and gradients written in place, change no bit; and memory is as reckoned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from backstash import kernels
from backstash.nn import GroupedMLP, RowMap, gathered
from backstash.recipes import autocast

pytestmark = pytest.mark.gpu
T, K, G, H, I = 700, 4, 6, 512, 256  # noqa: E741


def case() -> tuple[GroupedMLP, RowMap, Tensor, list[Tensor]]:
    torch.manual_seed(5)
    new: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    module = GroupedMLP(G, H, I, **new)
    expert_TK = torch.rand(T, G, device="cuda").argsort(1)[:, :K].contiguous()
    source_R, slots_TK, counts_G = kernels.sort_by_expert(expert_TK, G)
    x, dy = torch.randn(T, H, **new), torch.randn(T, H, **new)
    return module, RowMap(source_R, slots_TK), counts_G, [x, dy, torch.rand(T * K, device="cuda")]


def step(recipe: str, *, retain: bool = False, combined: bool = True) -> list[Any]:
    module, rows, counts_G, (x, dy, prob) = case()
    leaves = x.requires_grad_(), prob.requires_grad_()
    with autocast(recipe=recipe):
        y = module(leaves[0], counts_G, leaves[1], rows=rows, combined=combined)
    back = dy if combined else kernels.permute(dy, rows.source_R)
    y.backward(back, retain_graph=retain)
    if retain:
        for leaf in (*leaves, *module.parameters()):
            leaf.grad = None
        y.backward(back)
    y = y.detach() if combined else kernels.unpermute(y.detach(), rows.slots_TK)
    return [y, *(leaf.grad for leaf in (*leaves, *module.parameters()))]


@pytest.mark.parametrize("recipe", ["high_precision", "float8_rowwise", "mxfp8"])
def test_pieces_and_places_change_no_bit(recipe: str, monkeypatch: Any) -> None:
    wanted = step(recipe, combined=False)
    assert all(map(torch.equal, step(recipe), wanted))
    assert all(map(torch.equal, step(recipe, retain=True), wanted))
    monkeypatch.setattr(gathered, "_PIECE_BYTES", 1)
    assert all(map(torch.equal, step(recipe), wanted))


def test_the_peak_of_backward_is_what_it_reads_and_writes(monkeypatch: Any) -> None:
    monkeypatch.setattr(gathered, "_PIECE_BYTES", 1)
    step("high_precision")
    module, rows, counts_G, (x, dy, prob) = case()
    y = module(x.requires_grad_(), counts_G, prob.requires_grad_(), rows=rows, combined=True)
    inputs = [x, prob, *module.parameters()]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(y, inputs, dy)
    peak = torch.cuda.max_memory_allocated() - before
    R, size = T * K, 2
    # Beside the preactivation, whose gradient takes its place, first the activation, in the place
    # of its gradient, and one weight's gradient; then both weights', that of the tokens and of
    # some columns of the rows.
    first = R * I + G * H * I
    last = 3 * G * H * I + T * H + R * 256
    assert peak <= 1.05 * max(first, last) * size + 2**17
