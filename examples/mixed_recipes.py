"""Different layers of one model in different formats, by the role of each operand.

A recipe is asked for a format with a role: which operand, in which pass, of which layer.
The last recipe here quantizes what is kept for backward (inputs and pre-activations), leaves
every gradient all its bits, and does not touch the head.
"""

from __future__ import annotations

import torch
from torch import nn

import backstash as bs


def choose(role: bs.Role) -> bs.Format:
    """Give gradients all their bits, and everything else MXFP8."""
    return bs.HIGH_PRECISION if role.operand is bs.Operand.GRADIENT else bs.MXFP8


def make_model() -> nn.Module:
    """Three layers; ``name_modules`` tells each of ours its name, for recipes to go by."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("inward", bs.LayerNormLinear(64, 128, normalization="RMSNorm"))
    model.add_module("middle", bs.LayerNormMLP(128, 256, activation="swiglu"))
    model.add_module("head", bs.Linear(128, 32))
    return bs.name_modules(model)


def main() -> None:
    """Print what each recipe keeps, and how far its gradient is from the exact one."""
    model = make_model()
    x = torch.randn(128, 64, requires_grad=True)
    recipes = [
        bs.recipe("high_precision"),
        bs.recipe("mxfp8"),
        bs.recipe("mxfp8", preactivation=bs.MXFP8),
        bs.custom(choose, name="my own", keep_high_precision=("head",)),
    ]
    exact = torch.zeros_like(x)
    for number, recipe in enumerate(recipes):
        meter = bs.Meter()
        with bs.saving(meter), bs.autocast(recipe=recipe):
            y = model(x)
        (dx,) = torch.autograd.grad(y.square().sum(), x)
        exact = dx if number == 0 else exact
        error = (dx - exact).norm() / exact.norm()
        print(f"{recipe.name:<16} keeps {meter.bytes:>9,} bytes, gradient off by {error:.4f}")


if __name__ == "__main__":
    main()
