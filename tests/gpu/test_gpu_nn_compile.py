"""Compiled layers on a GPU give the eager bits, whichever kernels their products take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backstash as bs
from nn_cases import RECIPES

pytestmark = pytest.mark.gpu
H, F, ROWS = 64, 96, 48
#: Products in torch's matmuls, in Triton's and, with whole units of codes, in Gluon's.
KINDS = {name: bs.recipe(name) for name in RECIPES} | {
    f"{name}-in-matmul": bs.recipe(name, decode_in_matmul=True) for name in ("mxfp8", "nvfp4")
}
by_recipe = pytest.mark.parametrize("recipe", KINDS.values(), ids=KINDS)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Model(nn.Module):
    """Each kind of layer of ours, with operations of torch between them."""

    def __init__(self) -> None:
        super().__init__()
        self.start = bs.Linear(H, F)
        self.norm = bs.LayerNormLinear(F, H)
        self.feed_forward = bs.LayerNormMLP(H, F)
        self.grouped = bs.GroupedLinear(3, H, H)
        self.experts = bs.MoE(H, F, num_experts=4, top_k=2)

    def forward(self, x: Tensor, counts_G: Tensor) -> Tensor:
        x = self.norm(torch.relu(self.start(x)))
        x = x + self.feed_forward(x).tanh()
        return x + self.experts(self.grouped(x, counts_G).sin())


def step(model: Any, run: Any, recipe: Any) -> list[Any]:
    torch.manual_seed(2)
    x = torch.randn(ROWS, H, device="cuda").bfloat16().requires_grad_()
    counts_G = torch.tensor([5, 0, 43], device="cuda")
    model.zero_grad()
    with bs.autocast(recipe=recipe):
        y = run(x, counts_G)
    y.square().mean().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


# The compiler asks every tensor for its gradient, and hides what torch warns of then.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@by_recipe
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_gives_the_bits_of_an_eager_one(recipe: Any, backend: str) -> None:
    torch.manual_seed(1)
    model = Model().to("cuda", torch.bfloat16)
    twin = Model().to("cuda", torch.bfloat16)
    twin.load_state_dict(model.state_dict())
    expected = step(twin, twin, recipe)
    found = step(model, torch.compile(model, backend=backend), recipe)
    assert all(map(torch.equal, found, expected))


# The compiler warns about itself.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["float8_rowwise", "float8_block", "mxfp8"])
def test_the_default_compiler_leaves_the_products_as_they_are(name: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(bs.Linear(H, F), bs.Linear(F, H)).to("cuda", torch.bfloat16)
    x = torch.randn(ROWS, H, device="cuda").bfloat16()
    with bs.autocast(recipe=name), torch.no_grad():
        assert torch.equal(torch.compile(model)(x), model(x))
