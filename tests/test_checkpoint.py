"""``checkpoint`` gives the gradients of a plain call, bit for bit, and saves the input only."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import backstash as bs
from backstash.errors import ConfigError


def block(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(bs.Linear(16, 16), bs.MoE(16, 32, num_experts=4, top_k=2), nn.GELU())


def gradients(model: nn.Module, x: Tensor, recipe: str, *, checkpointed: bool) -> list[Tensor]:
    for parameter in model.parameters():
        parameter.grad = None
    x = x.detach().requires_grad_()
    with bs.autocast(recipe=recipe):
        y = bs.checkpoint(model, x) if checkpointed else model(x)
    y.square().sum().backward()
    grads = [x.grad, *(parameter.grad for parameter in model.parameters())]
    return [grad for grad in grads if grad is not None]


@pytest.mark.parametrize("recipe", bs.recipe_names())
def test_gradients_are_those_of_a_plain_call(recipe: str) -> None:
    x = torch.randn(13, 16)
    plain = gradients(block(), x, recipe, checkpointed=False)
    again = gradients(block(), x, recipe, checkpointed=True)
    assert len(plain) == len(again) == 6
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


def test_nothing_but_the_input_is_saved() -> None:
    model, x, meter = block(), torch.randn(13, 16, requires_grad=True), bs.Meter()
    with bs.saving(meter):
        bs.checkpoint(model, x)
    # Versions of torch differ in whether the input passes the hooks.
    assert meter.bytes <= x.nbytes


def test_keyword_arguments_reach_the_function() -> None:
    x = torch.randn(3, requires_grad=True)
    y = bs.checkpoint(lambda x, *, factor: x * factor, x, factor=3.0)
    y.sum().backward()
    assert torch.equal(y, x * 3)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3,), 3.0))


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [((None,), {}, "function"), ((torch.sin,), {"use_reentrant": True}, "use_reentrant=True")],
    ids=["nothing-to-call", "reentrant"],
)
def test_a_wrong_call_says_what_to_do(arguments: tuple, options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bs.checkpoint(*arguments, torch.ones(1), **options)
