"""A graph that is given up frees what it saved, whoever kept it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import backstash as bs


class Token:
    """Lives as long as the node that it is hung on."""


@pytest.mark.parametrize("contexts", [1, 2], ids="{} contexts".format)
def test_a_node_that_saves_its_own_output_does_not_hold_itself(contexts: int) -> None:
    x = torch.randn(8, requires_grad=True)
    token = Token()
    with bs.saving(bs.Meter()):
        if contexts == 2:
            with bs.saving(bs.Meter()):
                y = x.exp()
        else:
            y = x.exp()
    assert y.grad_fn is not None
    y.grad_fn.metadata["token"] = token  # pyright: ignore[reportIndexIssue]
    gone = weakref.ref(token)
    del token, y
    gc.collect()
    assert gone() is None


def test_an_output_changed_in_place_is_still_noticed() -> None:
    x = torch.randn(8, requires_grad=True)
    with bs.saving(bs.Meter()):
        y = x.exp()
    loss = y.sum()
    y.detach().add_(1)
    with pytest.raises(bs.ModifiedError, match="modified in place"):
        loss.backward()
