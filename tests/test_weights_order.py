"""The order of uses is a hint from the last pass; what it did not expect is counted."""

from __future__ import annotations

from backstash.formats import Usage
from backstash.weights.order import Order


def use(number: int) -> tuple[int, Usage]:
    return number, Usage.ROWWISE


def passes(order: Order, *numbers: int) -> list[list[int]]:
    """What was expected after each use."""
    expected = []
    for number in numbers:
        order.saw(use(number))
        expected.append([index for index, _ in order.upcoming(2)])
    order.close()
    return expected


def test_the_first_pass_expects_nothing_and_is_no_surprise() -> None:
    order = Order()
    assert passes(order, 0, 1, 2) == [[], [], []]
    assert order.surprises == 0


def test_a_pass_like_the_last_one_is_expected_whole() -> None:
    order = Order()
    passes(order, 0, 1, 0, 2)
    assert passes(order, 0, 1, 0, 2) == [[1, 0], [0, 2], [2], []]
    assert order.surprises == 0


def test_a_skipped_use_is_one_surprise_and_the_guess_goes_on_behind_it() -> None:
    order = Order()
    passes(order, 0, 1, 2, 3)
    assert passes(order, 0, 2, 3) == [[1, 2], [3], []]
    assert order.surprises == 1


def test_a_new_use_is_one_surprise_and_moves_the_guess_nowhere() -> None:
    order = Order()
    passes(order, 0, 1)
    assert passes(order, 0, 7, 1) == [[1], [1], []]
    assert order.surprises == 1


def test_rows_and_columns_of_a_weight_are_two_uses() -> None:
    order = Order()
    passes(order, 0)
    order.saw((0, Usage.COLUMNWISE))
    assert order.surprises == 1


def test_a_pass_that_failed_teaches_nothing() -> None:
    order = Order()
    passes(order, 0, 1)
    order.saw(use(5))
    order.forget()
    assert passes(order, 0, 1) == [[1], []]
