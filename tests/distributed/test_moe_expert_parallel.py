"""The example's dispatcher on several ranks: what one layer with all experts gives."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import WORLD, Ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from backstash.moe import MoE, RouterConfig

pytestmark = pytest.mark.distributed

EXAMPLE = Path(__file__).parents[2] / "examples" / "expert_parallel.py"
H, E = 12, 8


def dispatcher() -> Any:
    spec = importlib.util.spec_from_file_location("expert_parallel", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.AllToAll()


def layer(**options: Any) -> MoE:
    torch.manual_seed(1)
    config = RouterConfig(score="sigmoid")
    return MoE(H, 10, E, 2, router=config, dtype=torch.float64, **options)


def tokens(rank: int) -> Tensor:
    """Another number on each rank; none on one."""
    torch.manual_seed(10 + rank)
    return torch.randn(7 * rank, H, dtype=torch.float64, requires_grad=True)


def check(group: Any, *, is_recomputed: bool) -> None:
    rank = dist.get_rank()
    whole, part = layer(), layer(dispatcher=dispatcher())
    part.router.load_state_dict(whole.router.state_dict())
    pairs = list(zip(part.experts.parameters(), whole.experts.parameters(), strict=True))
    for mine, theirs in pairs:
        mine.data = theirs.data.chunk(WORLD)[rank].clone()
    x = tokens(rank)
    y: Any = checkpoint(part, x, use_reentrant=False) if is_recomputed else part(x)
    y.square().sum().backward()
    same = tokens(rank)
    expected = whole(same)
    torch.testing.assert_close(y, expected)
    (router,) = torch.autograd.grad(
        expected.square().sum(), [whole.router.weight], retain_graph=True
    )
    torch.testing.assert_close(part.router.weight.grad, router)
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, same.grad)
    for other in range(WORLD):
        if other != rank:
            whole(tokens(other)).square().sum().backward()
    for mine, theirs in pairs:
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad.chunk(WORLD)[rank])


@pytest.mark.parametrize("is_recomputed", [False, True], ids=["plain", "recomputed"])
def test_experts_on_several_ranks_are_one_layer(ranks: Ranks, is_recomputed: bool) -> None:
    ranks.run(functools.partial(check, is_recomputed=is_recomputed), size=WORLD)
