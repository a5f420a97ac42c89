"""Experts whose activation is codes alone learn what they learn from its values, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import backstash as bs
from backstash.nn import GroupedMLP, feed_forward
from backstash.nn.feed_forward import FeedForward

pytestmark = pytest.mark.gpu
COUNTS = [70, 0, 300, 5, 129]


class Calls:
    """How often only codes were made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, plain = 0, feed_forward.gradient_codes

        def counting(*args, **kwargs):
            self.count += 1
            return plain(*args, **kwargs)

        monkeypatch.setattr(feed_forward, "gradient_codes", counting)


def step(layer: GroupedMLP, x: Tensor, prob: Tensor | None, dy: Tensor) -> list[Tensor]:
    with bs.autocast(recipe=bs.recipe("float8_rowwise")):
        y = layer(x, COUNTS, prob)
    inputs = [x, *([] if prob is None else [prob]), *layer.parameters()]
    wanted = [one for one in inputs if one.requires_grad]
    return [y, *torch.autograd.grad(y, wanted, dy)]


def made(activation: str, *, bias: bool = False) -> tuple[GroupedMLP, Tensor, Tensor, Tensor]:
    new = {"device": "cuda", "dtype": torch.bfloat16}
    layer = GroupedMLP(len(COUNTS), 64, 80, bias, activation=activation, **new)
    rows = sum(COUNTS) + 11
    x, dy = torch.randn(rows, 64, **new).requires_grad_(), torch.randn(rows, 64, **new)
    prob = torch.rand(rows, device="cuda").requires_grad_()
    return layer, x, prob, dy


def check(
    monkeypatch: pytest.MonkeyPatch,
    layer: GroupedMLP,
    x: Tensor,
    prob: Tensor | None,
    dy: Tensor,
    *,
    calls: int,
) -> None:
    """Rows of the tail are not compared: nobody reads their gradients."""
    counted = Calls(monkeypatch)
    found = step(layer, x, prob, dy)
    assert counted.count == calls
    monkeypatch.setattr(FeedForward, "_formats_of_codes", lambda *_: None)
    wanted = step(layer, x, prob, dy)
    assert counted.count == calls
    valid = sum(COUNTS)
    for one, other in zip(found, wanted, strict=True):
        cut = valid if len(one) == len(x) else len(one)
        assert torch.equal(one[:cut], other[:cut])


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_gradients_are_those_of_values(
    activation: str, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x, prob, dy = made(activation)
    check(monkeypatch, layer, x, prob if weighted else None, dy, calls=1)


def test_what_reads_values_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, prob, dy = made("swiglu", bias=True)
    check(monkeypatch, layer, x, prob, dy, calls=0)


@pytest.mark.parametrize("frozen", ["fc1_weight", "fc2_weight"])
def test_a_frozen_weight_needs_no_codes(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, prob, dy = made("swiglu")
    getattr(layer, frozen).requires_grad_(False)
    check(monkeypatch, layer, x, prob, dy, calls=0)
