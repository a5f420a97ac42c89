"""A Mixture-of-Experts layer: what it keeps for backward, with and without low precision.

The gradients are also computed under ``torch.utils.checkpoint``, which runs the layer a
second time: they are the same bit for bit, because the choice of experts is saved and not
made again.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import backstash as bs


def step(moe: bs.MoE, x: Tensor, *, checkpointed: bool = False) -> tuple[int, list[Tensor]]:
    """Run forward and backward; return the bytes kept in between, and the gradients."""
    meter = bs.Meter()
    with bs.saving(meter):
        y = checkpoint(moe, x, use_reentrant=False) if checkpointed else moe(x)
    assert isinstance(y, Tensor)
    return meter.bytes, list(torch.autograd.grad(y.square().mean(), [x, *moe.parameters()]))


def main() -> None:
    """Print the bytes of each recipe, the load of the experts, and whether gradients agree."""
    torch.manual_seed(0)
    moe = bs.MoE(128, 256, num_experts=8, top_k=2, shared_ffn_hidden_size=256)
    x = torch.randn(4, 128, 128, requires_grad=True)

    for name in bs.recipe_names():
        with bs.autocast(recipe=name):
            kept, _ = step(moe, x)
        print(f"{name:<16} keeps {kept:>9,} bytes for backward")

    with bs.autocast(recipe="mxfp8"):
        _, grads = step(moe, x)
        _, again = step(moe, x, checkpointed=True)
    equal = all(torch.equal(one, other) for one, other in zip(grads, again, strict=True))
    print(f"rows an expert received: {moe.last_load.tolist() if moe.last_load is not None else []}")
    print(f"gradients under checkpoint are bit-equal: {equal}")


if __name__ == "__main__":
    main()
