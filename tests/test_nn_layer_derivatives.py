"""The gradients of every layer in float64 are those that finite differences find."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.func import functional_call

import backstash as bs
from backstash import kernels

COUNTS = [3, 0, 2]
ACTIVATIONS = ("gelu", "silu", "swiglu", "geglu")
DOUBLE: Any = {"dtype": torch.float64}

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: bs.Linear(3, 2, **DOUBLE),
    "layernorm_linear": lambda: bs.LayerNormLinear(3, 2, **DOUBLE),
    "rmsnorm_linear": lambda: bs.LayerNormLinear(3, 2, normalization="RMSNorm", **DOUBLE),
    "grouped_linear": lambda: bs.GroupedLinear(len(COUNTS), 3, 2, **DOUBLE),
    **{
        f"layernorm_mlp_{name}": lambda name=name: bs.LayerNormMLP(3, 2, activation=name, **DOUBLE)
        for name in ACTIVATIONS
    },
    **{
        f"experts_{name}": lambda name=name: bs.GroupedMLP(
            len(COUNTS), 3, 2, bias=True, activation=name, **DOUBLE
        )
        for name in ACTIVATIONS
    },
}


def check(layer: nn.Module, *inputs: Tensor, **others: Any) -> None:
    """Of a layer's inputs and parameters."""
    names = [name for name, _ in layer.named_parameters()]

    def of_all(*values: Tensor) -> Tensor:
        given, parameters = values[: len(inputs)], values[len(inputs) :]
        return functional_call(layer, dict(zip(names, parameters, strict=True)), given, others)

    values = (*inputs, *(parameter.detach() for parameter in layer.parameters()))
    assert gradcheck(of_all, [value.requires_grad_() for value in values])


def rows() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(sum(COUNTS) + 1, 3, **DOUBLE)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_inputs_and_parameters_are_derivatives(name: str) -> None:
    layer = LAYERS[name]()
    is_grouped = isinstance(layer, bs.GroupedLinear | bs.GroupedMLP)
    check(layer, rows(), **({"m_splits": COUNTS} if is_grouped else {}))


@pytest.mark.parametrize("combined", [False, True], ids=["rows", "combined"])
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_routing_weights_are_derivatives(
    activation: str, bias: bool, combined: bool
) -> None:
    experts = bs.GroupedMLP(3, 3, 2, bias=bias, activation=activation, **DOUBLE)
    expert_TK = torch.tensor([[0, 2], [2, 1], [1, 0], [0, 1], [2, 0], [0, 2]])
    source_R, slots_TK, counts_E = kernels.sort_by_expert(expert_TK, 3)
    calling = {"rows": bs.RowMap(source_R, slots_TK), "combined": combined}
    x_TH, prob_R = rows(), torch.rand(len(source_R), **DOUBLE)

    class Weighted(nn.Module):
        """Experts whose second input is the weights of the rows."""

        def __init__(self) -> None:
            super().__init__()
            self.experts = experts

        def forward(self, x: Tensor, prob: Tensor) -> Tensor:
            return self.experts(x, counts_E, prob, **calling)

    check(Weighted(), x_TH, prob_R)


def test_the_gradient_of_a_routing_weight_has_the_precision_of_float64() -> None:
    experts = bs.GroupedMLP(3, 3, 64, bias=True, **DOUBLE)
    x = rows()
    prob = torch.rand(len(x), **DOUBLE).requires_grad_()
    y = experts(x, COUNTS, prob)
    dy = torch.randn_like(y)
    (dprob,) = torch.autograd.grad(y, prob, dy)
    # What a weight multiplies is the output with a weight of one.
    wanted = (dy * experts(x, COUNTS, torch.ones_like(prob))).sum(1)
    few_roundings = 64 * torch.finfo(torch.float64).eps
    torch.testing.assert_close(dprob, wanted, rtol=few_roundings, atol=few_roundings)


@pytest.mark.parametrize("is_stashed", [False, True], ids=["kept", "stashed"])
def test_gradients_of_a_moe_layer_are_derivatives(is_stashed: bool) -> None:
    config = bs.RouterConfig(score="sigmoid")
    layer = bs.MoE(3, 2, 4, 2, shared_ffn_hidden_size=2, router=config, **DOUBLE)
    stash = bs.Stash(bs.PagePool(1 << 16, device="cpu", page_bytes=16))
    with bs.saving(stash) if is_stashed else contextlib.nullcontext():
        check(layer, rows())
