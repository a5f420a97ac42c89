"""A node may get what a handler keeps without a copy; nobody else sees that it could."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import backstash as bs
from backstash.kernels import PagedRows
from backstash.saving import Fits, taken_values
from saving_cases import Declining, Keeper, copying, identity, leaf, nest

ROWS, ENDS = 6, torch.tensor([2, 5])


class InPlace(Keeper):
    """A keeper whose values could be read in pages; it has none, the holder is the value."""

    def __init__(self) -> None:
        super().__init__()
        self.read_in_place = 0

    def read(self, handle: Any, fits: Fits) -> Tensor | PagedRows:
        (value,) = handle
        nothing = torch.empty(0)
        paged = PagedRows(
            nothing, nothing, nothing, 0, 1, 16, value.dtype, value.shape, holder=value
        )
        if not fits(paged):
            return self.unpack(handle)
        self.read_in_place += 1
        return paged


def _value_of(value: Any) -> Tensor:
    """What came back, wherever it is."""
    found: Any = value.holder if isinstance(value, PagedRows) else value
    return found.data if isinstance(found, bs.GroupedTensor) else found


FITS: dict[int, Fits] = {}


class _Node(torch.autograd.Function):
    """Saves a plain tensor, rows in groups, and its input; its gradient shows all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        plain = torch.arange(3.0) + 1
        rows = bs.GroupedTensor(torch.arange(12.0).view(ROWS, 2), ENDS)
        bs.save_for_backward(ctx, plain, rows, x, None)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (plain, rows, x, nothing), _ = taken_values(ctx, FITS)
        assert nothing is None
        plain, rows = (_value_of(value) for value in (plain, rows))
        return dy * plain * rows[:5].sum() * x


@pytest.fixture(autouse=True)
def everything_fits() -> None:
    FITS.clear()
    FITS.update({0: lambda paged: True, 1: lambda paged: paged.shape == (ROWS, 2)})


def gradient(*contexts: Any, function: Callable[[Tensor], Tensor] = _Node.apply) -> Tensor:
    x = leaf()
    with nest(*contexts):
        y = function(x)
    y.sum().backward()
    assert x.grad is not None
    return x.grad


def test_a_node_gets_what_fits_where_it_is_and_the_rest_as_tensors() -> None:
    keeper, plain = InPlace(), gradient()
    assert torch.equal(gradient(bs.saving(keeper)), plain)
    assert (keeper.packed, keeper.read_in_place, keeper.unpacked) == (5, 2, 3)
    FITS[1] = lambda paged: False
    assert torch.equal(gradient(bs.saving(keeper)), plain)
    assert (keeper.read_in_place, keeper.unpacked) == (3, 7)
    FITS.clear()
    assert torch.equal(gradient(bs.saving(keeper)), plain)
    assert (keeper.read_in_place, keeper.unpacked) == (3, 12)


@pytest.mark.parametrize(
    "around",
    [identity, copying, save_on_cpu, lambda: bs.saving(Declining()), lambda: bs.saving(Keeper())],
    ids=["identity", "copying", "save_on_cpu", "saving", "keeping"],
)
def test_other_hooks_get_tensors_inside_and_outside(around: Callable[[], Any]) -> None:
    keeper, plain = InPlace(), gradient()
    assert torch.equal(gradient(bs.saving(keeper), around()), plain)
    # Whoever is innermost was asked first.
    assert keeper.read_in_place == 0
    assert torch.equal(gradient(around(), bs.saving(keeper)), plain)
    assert keeper.read_in_place == 2


def test_a_handler_that_cannot_read_in_place_is_asked_for_tensors() -> None:
    keeper = Keeper()
    assert torch.equal(gradient(bs.saving(keeper)), gradient())
    assert (keeper.packed, keeper.unpacked) == (5, 5)


def test_a_backward_inside_of_a_hook_gets_tensors() -> None:
    outer, found = torch.ones(3, requires_grad=True), []
    with bs.saving(InPlace()):
        inner = (outer.exp() * outer).sum()

    def differentiate(tensor: Tensor) -> Tensor:
        found.append(torch.autograd.grad(inner, outer, retain_graph=True)[0])
        return tensor

    # It is asked by the hooks that could give stand-ins.
    contexts = saved_tensors_hooks(lambda tensor: tensor, differentiate), bs.saving(Declining())
    assert torch.equal(gradient(*contexts), gradient())
    assert len(found) == 5
    assert torch.allclose(found[0], torch.full((3,), 2 * torch.e))


def test_a_node_of_torch_inside_the_same_context_gets_tensors() -> None:
    keeper = InPlace()

    def around(x: Tensor) -> Tensor:
        return _Node.apply(x.sin()).square()

    assert torch.equal(gradient(bs.saving(keeper), function=around), gradient(function=around))
    assert keeper.read_in_place == 2


def test_a_retained_graph_is_read_in_place_again() -> None:
    keeper, x = InPlace(), leaf()
    with bs.saving(keeper):
        y = _Node.apply(x).sum()
    first, second = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert keeper.read_in_place == 4
