"""What two matmuls with an activation between them need follows from what is wanted of them."""

from __future__ import annotations

import pytest

from backstash import kernels
from backstash.errors import ConfigError
from backstash.nn.feed_forward import (
    Wanted,
    Weights,
    checked_activation,
    preactivation_columns,
)
from backstash.nn.projection import Needs

NO, YES = False, True


def wanted(*, fc1: bool = False, fc2: bool = False) -> Wanted:
    return Wanted(NO, NO, Weights(fc1, NO, fc2, NO))


def test_the_last_weight_alone_needs_nothing_of_the_first_matmul() -> None:
    last = wanted(fc2=True)
    assert (last.h, last.fc1, last.fc2) == (NO, Needs(NO, NO, NO), Needs(NO, YES, NO))


def test_the_first_weight_needs_the_gradient_through_the_last() -> None:
    first = wanted(fc1=True)
    assert (first.h, first.fc1, first.fc2) == (YES, Needs(NO, YES, NO), Needs(YES, NO, NO))


@pytest.mark.parametrize("of", ["x", "prob"])
def test_rows_and_their_weights_need_the_gradient_through_the_last(of: str) -> None:
    rows = Wanted(of == "x", of == "prob", Weights(NO, NO, NO, NO))
    assert rows.h
    assert rows.fc2 == Needs(YES, NO, NO)
    assert rows.fc1 == Needs(of == "x", NO, NO)


@pytest.mark.parametrize("activation", kernels.ACTIVATIONS)
def test_a_gated_activation_reads_two_columns_for_each_it_gives(activation: str) -> None:
    factor = 2 if activation in ("swiglu", "geglu", "reglu") else 1
    assert preactivation_columns(checked_activation(activation), 10) == 10 * factor


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"activation must be one of gelu.*, got 'tanh'"):
        checked_activation("tanh")
