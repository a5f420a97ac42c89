"""Experts in plain PyTorch that tell the stash how many rows of each buffer are there.

They take the weights and arguments of a transformers block, so they can take its place:
``layer.mlp.experts = CapacityExperts(theirs.gate_up_proj, theirs.down_proj, room=2.0)``.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backstash as bs


class CapacityExperts(nn.Module):
    """Gated experts, ``(E, 2I, H)`` and ``(E, H, I)``, with room for more rows than there are."""

    def __init__(self, gate_up: nn.Parameter, down: nn.Parameter, *, room: float) -> None:
        super().__init__()
        self.gate_up, self.down, self.room = gate_up, down, room

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Give each token of ``x`` (T, H) the weighted sum of its experts."""
        order = top_k_index.flatten().argsort(stable=True)
        counts = order.new_zeros(self.down.shape[0])
        counts = counts.scatter_add(0, top_k_index.flatten(), torch.ones_like(order))
        ends, spare = counts.cumsum(0).int(), int(order.numel() * (self.room - 1))
        token = F.pad(order // top_k_index.shape[1], (0, spare))
        weight = F.pad(top_k_weights.flatten()[order], (0, spare))
        is_there = (torch.arange(len(token), device=x.device) < ends[-1])[:, None]

        def marked(buffer: Tensor) -> Tensor:
            # Before it is used: what uses it saves it for backward.
            bs.mark_grouped_tensor(buffer, ends[-1:])
            return buffer

        rows = marked(torch.where(is_there, x[token], 0.0))
        hidden = marked(F.grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends))
        gate, up = hidden.chunk(2, dim=-1)
        inner = marked(marked(F.silu(gate)) * up)
        y = torch.where(is_there, F.grouped_mm(inner, self.down.transpose(1, 2), offs=ends), 0.0)
        return torch.zeros_like(x).index_add(0, token, (y * weight[:, None]).to(x.dtype))


def main() -> None:
    """Print what the stash kept, and whether gradients agree."""
    weights = [nn.Parameter(torch.randn(8, *shape) / 8) for shape in ((192, 64), (64, 96))]
    layer = CapacityExperts(*weights, room=2.0).bfloat16()
    x = torch.randn(512, 64, dtype=torch.bfloat16, requires_grad=True)
    weight, index = torch.rand(512, 8).bfloat16().topk(2)
    stash = bs.Stash(bs.PagePool(16 << 20, device="cpu"), tail=bs.Tail.ZEROS)
    with bs.saving(stash):
        kept = torch.autograd.grad(layer(x, index, weight).square().sum(), list(layer.parameters()))
    plain = torch.autograd.grad(layer(x, index, weight).square().sum(), list(layer.parameters()))
    print("bit-equal:", all(torch.equal(a, b) for a, b in zip(kept, plain, strict=True)))
    print(stash.stats())


if __name__ == "__main__":
    main()
