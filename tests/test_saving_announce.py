"""A node says which tensors it will save together, before it saves them one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import backstash as bs


class Listener:
    """Notes what it is told, and keeps nothing."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, list[int]]] = []

    def expect(self, tensors: list[Tensor]) -> None:
        self.heard.append(("expect", [t.numel() for t in tensors]))

    def pack(self, tensor: Tensor, rows: Tensor | None) -> None:
        self.heard.append(("pack", [tensor.numel()]))

    def unpack(self, handle: Any) -> Tensor:
        raise AssertionError("nothing was kept")


class Deaf:
    """A handler without the third method."""

    def pack(self, tensor: Tensor, rows: Tensor | None) -> None:
        return None

    def unpack(self, handle: Any) -> Tensor:
        raise AssertionError("nothing was kept")


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        bs.save_for_backward(ctx, x, None, weight, x[:2] * 1, x[:1] * 1)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, _, weight, *_ = bs.saved_values(ctx)
        return grads[0] * weight, (grads[0] * x).sum(0)


def run() -> None:
    x = torch.ones(4, 1, requires_grad=True)
    _Node.apply(x, torch.nn.Parameter(torch.ones(1))).sum().backward()


def test_a_handler_is_told_all_tensors_of_a_node_before_the_first_comes() -> None:
    listener = Listener()
    with bs.saving(Deaf(), listener):
        run()
    assert listener.heard == [
        ("expect", [4, 2, 1]),
        ("pack", [4]),
        ("pack", [2]),
        ("pack", [1]),
    ]


def test_what_an_inner_context_declines_is_announced_outside_too() -> None:
    listener = Listener()
    with bs.saving(listener), bs.saving(Deaf()):
        run()
    assert listener.heard[0] == ("expect", [4, 2, 1])
    assert len(listener.heard) == 4


@pytest.mark.parametrize("hooks", ["none", "foreign", "left"])
def test_nobody_is_told_what_is_not_offered_to_him(hooks: str) -> None:
    listener = Listener()
    context = bs.saving(listener)
    if hooks == "foreign":
        with context, torch.autograd.graph.save_on_cpu():
            run()
    elif hooks == "left":
        with context:
            pass
        run()
    else:
        run()
    assert listener.heard == []
