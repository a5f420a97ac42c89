"""Experts in plain PyTorch, with a buffer whose valid rows are marked for the stash.

A rank of experts cannot know how many rows it will get, so its buffer has room for more.  A call
for each buffer tells the stash how many are there; the rest of the model needs no change.
``CapacityExperts`` takes the weights of an expert block as transformers has them, and its
arguments, so it can take the place of one::

    for layer in model.model.layers:
        layer.mlp.experts = CapacityExperts(
            layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj, capacity_factor=2.0
        )
    with bs.saving(bs.Stash(pool, tail=bs.Tail.ZEROS)):
        loss = model(input_ids, labels=input_ids).loss
    loss.backward()
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backstash as bs


class CapacityExperts(nn.Module):
    """Gated experts whose rows lie in a buffer of ``capacity_factor`` times as many.

    Args:
        gate_up_proj: ``(E, 2I, H)``.
        down_proj: ``(E, H, I)``.
        capacity_factor: Room in the buffer, over the rows that there are.
    """

    def __init__(
        self, gate_up_proj: nn.Parameter, down_proj: nn.Parameter, *, capacity_factor: float
    ) -> None:
        super().__init__()
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self.capacity_factor = capacity_factor

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Give each token of ``x`` (T, H) the weighted sum of its experts."""
        experts, top_k = self.gate_up_proj.shape[0], top_k_index.shape[1]
        order = top_k_index.flatten().argsort(stable=True)
        room = int(order.numel() * (self.capacity_factor - 1))
        counts = torch.zeros(experts, dtype=torch.int64, device=x.device)
        counts = counts.scatter_add(0, top_k_index.flatten(), torch.ones_like(order))
        ends = counts.cumsum(0).int()
        token = F.pad(order // top_k, (0, room))
        is_there = (torch.arange(len(token), device=x.device) < ends[-1])[:, None]

        def marked(buffer: Tensor) -> Tensor:
            # Before it is used: what uses it saves it for backward.
            bs.mark_grouped_tensor(buffer, ends[-1:])
            return buffer

        rows = marked(torch.where(is_there, x[token], 0.0))
        hidden = marked(F.grouped_mm(rows, self.gate_up_proj.transpose(1, 2), offs=ends))
        gate, up = hidden.chunk(2, dim=-1)
        inner = marked(marked(F.silu(gate)) * up)
        y = F.grouped_mm(inner, self.down_proj.transpose(1, 2), offs=ends)
        y = torch.where(is_there, y, 0.0)
        weight = F.pad(top_k_weights.flatten()[order], (0, room))
        return torch.zeros_like(x).index_add(0, token, (y * weight[:, None]).to(x.dtype))


def main() -> None:
    """Print what the stash kept, and whether gradients agree."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens, width, inner, experts = 512, 64, 96, 8
    layer = CapacityExperts(
        nn.Parameter(torch.randn(experts, 2 * inner, width) / 8),
        nn.Parameter(torch.randn(experts, width, inner) / 8),
        capacity_factor=2.0,
    ).to(device, torch.bfloat16)
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    weights, index = torch.rand(tokens, experts, device=device).topk(2)
    pool = bs.PagePool(16 << 20, device=device, page_bytes=4096)
    stash = bs.Stash(pool, tail=bs.Tail.ZEROS)

    gradients = []
    for handlers in ((), (stash,)):
        with bs.saving(*handlers):
            loss = layer(x, index, weights.bfloat16()).float().square().mean()
        gradients.append(torch.autograd.grad(loss, [x, *layer.parameters()]))
    equal = all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    stats = stash.stats()
    print(f"kept {stats.bytes_stashed:,} bytes of valid rows in {stats.device_high} pages")
    print(f"gradients with and without the stash are bit-equal: {equal}")


if __name__ == "__main__":
    main()
