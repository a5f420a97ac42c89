"""A layer differentiated twice raises; differentiated once under ``create_graph`` it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backstash as bs
from saving_cases import grad_of


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, note: str) -> tuple[Tensor, Tensor]:
        bs.save_for_backward(ctx, x)
        ctx.plan = note
        return x**3, x + 1

    @staticmethod
    @bs.differentiable_once
    def backward(ctx: Any, dcube: Tensor, dsum: Tensor) -> tuple[Tensor, None]:
        (x,) = bs.saved_values(ctx)
        return dcube * 3 * x**2 + dsum, None


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: bs.Linear(4, 4),
    "LayerNormLinear": lambda: bs.LayerNormLinear(4, 4),
    "LayerNormMLP": lambda: bs.LayerNormMLP(4, 8),
    "MoE": lambda: bs.MoE(4, 8, num_experts=2, top_k=1),
}


@pytest.mark.parametrize("reduce", [Tensor.sum, lambda y: y.square().sum()], ids=["sum", "square"])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_a_second_derivative_through_a_layer_raises(
    make: Callable[[], nn.Module], reduce: Callable[[Tensor], Tensor]
) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    (dx,) = torch.autograd.grad(reduce(make()(x)), x, create_graph=True)
    with pytest.raises(bs.SecondOrderError, match="differentiated twice"):
        dx.square().sum().backward()


@pytest.mark.parametrize("reduce", [Tensor.sum, lambda y: y.square().sum()], ids=["sum", "square"])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_a_hessian_raises_and_is_not_zero(
    make: Callable[[], nn.Module], reduce: Callable[[Tensor], Tensor]
) -> None:
    layer = make()
    with pytest.raises(bs.SecondOrderError, match="differentiated twice"):
        torch.autograd.functional.hessian(lambda x: reduce(layer(x)), torch.randn(3, 4))


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_a_second_derivative_by_a_weight_raises_and_is_not_none(
    make: Callable[[], nn.Module],
) -> None:
    layer, x = make(), torch.randn(3, 4, requires_grad=True)
    (dx,) = torch.autograd.grad(layer(x * 2).sum(), x, create_graph=True)
    with pytest.raises(bs.SecondOrderError, match="differentiated twice"):
        torch.autograd.grad(dx.sum(), [*layer.parameters()], allow_unused=True)


def test_a_gradient_may_feed_what_is_differentiated_by_something_else() -> None:
    layer, head = bs.Linear(4, 4), nn.Linear(4, 1)
    x = torch.randn(3, 4, requires_grad=True)
    (dx,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    (dhead,) = torch.autograd.grad(head(dx).sum(), head.weight)
    assert torch.equal(dhead[0], dx.sum(0).detach())


def test_the_first_derivative_is_the_same_with_and_without_a_graph() -> None:
    x = torch.randn(5, requires_grad=True)
    one, two = (
        torch.autograd.grad(torch.stack(_Cube.apply(x, "")).sum(), x, create_graph=graph)[0]
        for graph in (False, True)
    )
    assert torch.equal(one, two)
    assert torch.equal(one, (3 * x**2 + 1).detach())


def test_the_gradient_can_be_used_where_it_is_not_differentiated() -> None:
    layer, x = bs.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    (dx,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    penalty = dx.detach().norm()
    (penalty * x.sum()).backward()
    assert torch.equal(grad_of(x), penalty.expand(3, 4))
