"""Putting values together again refuses what changed since, and what did not come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import backstash as bs
from saving_cases import BY_REFERENCE, HOOKS, Carrier, leaf, values_2d

each_hook = pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)


@pytest.mark.parametrize("make", BY_REFERENCE.values(), ids=BY_REFERENCE)
@each_hook
def test_an_in_place_change_of_what_is_kept_by_reference_is_an_error(
    hook: Callable[[], Any], make: Callable[[], Any]
) -> None:
    value = make()
    with hook():
        y = Carrier(value)(leaf()).sum()
    with torch.no_grad():
        value.mul_(2)
    with pytest.raises(bs.ModifiedError, match="modified in place") as caught:
        y.backward()
    assert isinstance(caught.value, RuntimeError)


def test_an_in_place_change_among_many_parameters_names_the_one() -> None:
    parameters = [nn.Parameter(torch.ones(n)) for n in range(1, 30)]
    y = Carrier(*parameters, values_2d())(leaf()).sum()
    with torch.no_grad():
        parameters[12].add_(1)
    with pytest.raises(bs.ModifiedError, match=r"\(13,\)"):
        y.backward()


def test_a_change_before_saving_is_no_error() -> None:
    weight = nn.Parameter(values_2d())
    with torch.no_grad():
        weight.mul_(2)
    (carrier := Carrier(weight))(leaf()).sum().backward()
    carrier.check()


def test_a_buffer_of_a_quantized_tensor_changed_in_place_is_an_error() -> None:
    q = bs.MXFP8.quantize(values_2d())
    y = Carrier(q)(leaf()).sum()
    q.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("given", [0, 1, 3])
@pytest.mark.parametrize("with_parameter", [False, True], ids=["plain", "with_parameter"])
def test_a_wrong_number_of_tensors_is_an_error(given: int, with_parameter: bool) -> None:
    extra = [nn.Parameter(torch.ones(1))] if with_parameter else []
    tensors, records = bs.prepare_for_saving(torch.ones(1), *extra, torch.ones(2))
    assert len(tensors) == 2
    with pytest.raises(bs.ShapeError, match="2 tensors were prepared for saving"):
        bs.restore_from_saved(records, [torch.ones(1)] * given)


def test_a_buffer_that_a_hook_lost_is_an_error() -> None:
    _, records = bs.prepare_for_saving(TwoTensor(torch.ones(1), torch.ones(1)))
    with pytest.raises(bs.ShapeError, match="came back as None"):
        bs.restore_from_saved(records, [torch.ones(1), None])
