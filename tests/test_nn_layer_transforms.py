"""Layers inside of what is compiled, and under the transforms of ``torch.func``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import backstash as bs
from backstash.errors import UnsupportedOpError
from nn_cases import CASE_NAMES, CASES, RECIPES, Case, H, N, run, shard

by_case = pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="aot_eager", **options)


def step(module: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> list[Any]:
    """The loss, and the gradients of the input and of every parameter."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    loss = forward(x)
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in module.parameters())]


@by_case
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_compiled_layer_gives_the_bits_of_an_eager_one(case: Case, recipe: str) -> None:
    expected = run(case, case.make(), recipe)
    found = run(case, compiled(case.make()), recipe)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("recipe", ["high_precision", "nvfp4"])
@pytest.mark.parametrize("way", ["around", "inside"])
def test_a_model_of_our_layers_and_others_can_be_compiled(recipe: str, way: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(bs.Linear(H, N), nn.GELU(), bs.LayerNormMLP(N, H), nn.Linear(N, 3))
    x = torch.randn(5, H)
    compiled_model = compiled(model)

    def forward(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        with bs.autocast(recipe=recipe):
            return run(x).square().mean()

    expected = step(model, lambda x: forward(model, x), x)
    if way == "around":
        found = step(model, lambda x: forward(compiled_model, x), x)
    else:
        found = step(model, compiled(lambda x: forward(model, x)), x)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["plain", "checkpointed"])
def test_a_compiled_mixture_of_experts_routes_as_an_eager_one(is_checkpointed: bool) -> None:
    torch.manual_seed(1)
    moe = bs.MoE(H, N, num_experts=4, top_k=2)
    x = torch.randn(7, H)

    def forward(x: Tensor) -> Tensor:
        run = compiled(moe)
        y = checkpoint(run, x, use_reentrant=False) if is_checkpointed else run(x)
        assert isinstance(y, Tensor)
        return y.square().mean()

    expected = step(moe, lambda x: moe(x).square().mean(), x)
    assert all(map(torch.equal, step(moe, forward, x), expected))


def test_a_layer_with_a_shard_can_be_compiled() -> None:
    module = bs.Linear(H, N)
    shard(module)
    x = torch.ones(2, H)
    expected = step(module, lambda x: module(x).sum(), x)
    found = step(module, lambda x: compiled(module)(x).sum(), x)
    assert all(map(torch.equal, found, expected))


@by_case
def test_a_graph_without_breaks_is_refused_with_the_remedy(case: Case) -> None:
    module = compiled(case.make(), fullgraph=True)
    with pytest.raises(RuntimeError, match="leave out fullgraph=True"):
        case.call(module, *case.inputs())


TRANSFORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x])),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
}


# Torch scripts its own decompositions when the first forward derivative is taken, and warns.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@by_case
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_transform_of_a_layer_is_refused_with_the_remedy(case: Case, transform: Any) -> None:
    module, given = case.make(), case.arguments()
    case = dataclasses.replace(case, arguments=lambda: given)
    x, *others = case.inputs()
    with pytest.raises(UnsupportedOpError, match=r"torch\.func .* take the gradient with backward"):
        transform(lambda x: case.call(module, x, *others), x.detach())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("which", ["input", "weight"])
def test_a_forward_derivative_of_a_layer_is_refused_with_the_remedy(which: str) -> None:
    module, x = bs.Linear(H, N), torch.ones(2, H)
    with forward_ad.dual_level():
        assert module(x).shape == (2, N)  # nothing is asked yet
        given = {"input": x, "weight": module.weight.detach()}
        given[which] = forward_ad.make_dual(given[which], given[which])
        with pytest.raises(UnsupportedOpError, match="a forward derivative; take the gradient"):
            torch.func.functional_call(module, {"weight": given["weight"]}, (given["input"],))


def test_a_functional_call_is_that_of_the_layer() -> None:
    module, x = bs.Linear(H, N), torch.ones(2, H)
    state = {name: 2 * p.detach() for name, p in module.named_parameters()}
    assert torch.equal(torch.func.functional_call(module, state, (x,)), 2 * module(x))


# What a router saw last is no output of the program, and torch warns that it is left out.
@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
def test_a_mixture_of_experts_can_be_exported_for_inference() -> None:
    moe = bs.MoE(H, N, num_experts=4, top_k=2)
    x = torch.randn(7, H)
    with torch.no_grad():
        program = torch.export.export(moe, (x,), strict=False)
    torch.testing.assert_close(program.module()(x), moe(x))
