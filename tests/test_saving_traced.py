"""What ``torch.compile`` may trace of saving: plain tensors, and no weight that gathers itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from backstash.errors import CompileError
from backstash.saving import save_for_backward, saved_values

pytestmark = [
    # Torch's own tracer makes an instance of a Function, and asks tensors for their gradients.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class _Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        save_for_backward(ctx, x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore
        x, weight = saved_values(ctx)
        return dy * weight, dy * x


def times(x: Tensor, weight: Tensor) -> Tensor:
    return _Times.apply(x.sin(), weight).cos()  # pyright: ignore


def distributed() -> Tensor:
    weight: Any = torch.nn.Parameter(torch.ones(4))
    weight.is_distributed_weight = True
    return weight


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_distributed_weight_is_refused_with_the_remedy(fullgraph: bool) -> None:
    compiled = torch.compile(times, backend="eager", fullgraph=fullgraph)
    with pytest.raises(CompileError, match=r"torch\.compiler\.disable"):
        compiled(torch.ones(4, requires_grad=True), distributed())


def test_in_what_runs_uncompiled_inside_a_compiled_function_it_is_refused_too() -> None:
    def breaks(x: Tensor, weight: Tensor) -> Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return times(x, weight)

    compiled = torch.compile(breaks, backend="eager")
    with pytest.raises(CompileError, match=r"torch\.compiler\.disable"):
        compiled(torch.ones(4, requires_grad=True), distributed())


def test_where_nothing_is_compiled_it_is_kept() -> None:
    weight = distributed()
    disabled: Any = torch.compiler.disable(times)

    def around(x: Tensor) -> Tensor:
        return disabled(x + 1, weight) * 2

    x = torch.ones(4, requires_grad=True)
    found = torch.autograd.grad(torch.compile(around, backend="eager")(x).sum(), x)
    assert torch.equal(found[0], torch.autograd.grad(around(x).sum(), x)[0])


@pytest.mark.parametrize("fullgraph", [False, True])
def test_plain_tensors_are_traced_whole(fullgraph: bool) -> None:
    compiled = torch.compile(times, backend="eager", fullgraph=fullgraph)
    results = []
    for run in (times, compiled):
        torch.manual_seed(1)
        x, weight = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
        y = run(x, weight)
        results.append([y, *torch.autograd.grad(y.sum(), (x, weight))])
    assert all(map(torch.equal, *results))
