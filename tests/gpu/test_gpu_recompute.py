"""Recomputation on a GPU while torch records where memory is allocated."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from backstash.moe import Local, MoE

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["without reentry", "reentrant"])
def test_allocations_can_be_recorded_while_a_layer_is_computed_again(use_reentrant: bool) -> None:
    layer = MoE(64, 32, 4, 2, dispatcher=Local(capacity_factor=2.0), device="cuda")
    x = torch.randn(96, 64, device="cuda", requires_grad=True)
    leaves = [x, *layer.parameters()]

    def gradients() -> list[Tensor]:
        for leaf in leaves:
            leaf.grad = None
        checkpoint(layer, x, use_reentrant=use_reentrant).square().sum().backward()  # pyright: ignore
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    wanted = gradients()
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
    try:
        got = gradients()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    assert len(got) == len(wanted) == len(leaves)
    assert all(map(torch.equal, got, wanted))
