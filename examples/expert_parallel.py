"""A dispatcher for experts on several ranks: each row goes to the rank that has its expert.

``torchrun --nproc-per-node 2 examples/expert_parallel.py`` compares two ranks with one layer.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

import backstash as bs
from backstash.moe import Dispatched, Routing

exchange: Any = collectives.all_to_all_single_autograd


@dataclass(frozen=True)
class Sent(Dispatched):
    way: Any = None  # how the rows came here


class AllToAll:
    """Rank r of the world has the r-th part of the experts."""

    def local_experts(self, num_experts: int) -> int:
        return num_experts // dist.get_world_size()

    def dispatch(self, x_TH: Tensor, routing: Routing) -> Sent:
        rows, counts_E = bs.RowMap.by_expert(routing.expert_TK, len(routing.counts_E))
        there = counts_E.view(dist.get_world_size(), -1)
        dist.all_to_all_single(here := torch.empty_like(there), there)
        sizes = here.sum(1).tolist(), there.sum(1).tolist()
        given = x_TH[rows.source_R], rows.weights(routing.prob_TK)
        x_RH, prob_R = (exchange(each, *sizes, dist.group.WORLD) for each in given)
        # They came rank by rank, and experts want them expert by expert.
        expert = torch.arange(here.shape[1], device=here.device).repeat(len(here))
        order_R = expert.repeat_interleave(here.flatten()).argsort(stable=True)
        way = rows.slots_TK, order_R.argsort(), sizes[::-1]
        return Sent(x_RH[order_R], here.sum(0), prob_R[order_R], None, way=way)

    def combine(self, y: Tensor, sent: Any) -> Tensor:
        slots_TK, back_R, sizes = sent.way
        return exchange(y[back_R], *sizes, dist.group.WORLD)[slots_TK].sum(1)


if __name__ == "__main__":
    alone: Any = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # pyright: ignore
    dist.init_process_group("gloo", **({} if dist.is_torchelastic_launched() else alone))
    torch.manual_seed(0)
    whole, part = bs.MoE(32, 64, 8, 2), bs.MoE(32, 64, 8, 2, dispatcher=AllToAll())
    part.router.load_state_dict(whole.router.state_dict())
    for mine, theirs in zip(part.experts.parameters(), whole.experts.parameters(), strict=True):
        mine.data = theirs.data.chunk(dist.get_world_size())[dist.get_rank()].clone()
    x = torch.randn(100 + dist.get_rank(), 32)
    print("the same as with all experts here:", torch.allclose(part(x), whole(x), atol=1e-5))
    dist.destroy_process_group()
