"""A node says which tensors it will save together, before it saves them one by one."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import backstash as bs
from backstash.saving.hooks import announce_product


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
    """A handler without the other methods."""

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


class Mover:
    """Keeps what is marked, counts the products that it hears of, and has the moves it is given."""

    def __init__(self, moves: object = None) -> None:
        self.moves = moves
        self.products = 0

    def multiply(self) -> object:
        self.products += 1
        return self.moves

    def pack(self, tensor: Tensor, rows: Tensor | None) -> Tensor | None:
        return None if rows is None else tensor.detach()

    def unpack(self, handle: Tensor) -> Tensor:
        return handle


def test_grouped_products_are_announced_in_forward_and_in_backward() -> None:
    mover, layers = Mover(), [bs.GroupedLinear(2, 8, 8), bs.GroupedMLP(2, 8, 8), bs.Linear(8, 8)]
    x = torch.ones(5, 8, requires_grad=True)
    with bs.saving(Deaf(), mover):
        y = layers[2](layers[1](layers[0](x, [2, 3]), [2, 3]))
    assert mover.products == 3
    y.sum().backward()
    # Of each of the three the rows and the weights.
    assert mover.products == 9
    layers[0](x.detach(), [2, 3])


def test_the_first_handler_that_has_moves_gives_them_to_the_matmul() -> None:
    moves = [object(), object()]
    with bs.saving(Deaf(), Mover(), Mover(moves[0]), Mover(moves[1])):
        assert announce_product() is moves[0]
    with bs.saving(Mover(moves[1])), torch.autograd.graph.save_on_cpu():
        assert announce_product() is None


def test_backward_asks_the_handler_that_it_asked_last_while_there_is_one() -> None:
    mover = Mover(object())
    x = torch.ones(4, 1, requires_grad=True) * 1.0
    bs.mark_grouped_tensor(x, torch.tensor([4]))
    with bs.saving(mover):
        y = x * x
    y.sum().backward()
    assert announce_product() is mover.moves
    del y, mover
    gc.collect()
    assert announce_product() is None
