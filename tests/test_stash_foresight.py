"""What followed what in the last round is expected to follow it again."""

from __future__ import annotations

import pytest

from backstash.stash.foresight import Foresight


def test_before_there_was_a_round_the_last_in_is_expected_first_out() -> None:
    foresight = Foresight()
    assert foresight.after(7) == 6


def test_the_order_of_the_last_round_is_expected_again() -> None:
    foresight = Foresight()
    assert [foresight.asked(number, newest=9) for number in (2, 0, 0, 1)] == [
        True,
        True,
        False,
        True,
    ]
    assert foresight.after(2) == 1  # this round's order is not known before it has ended
    foresight.new_round()
    assert [foresight.after(number) for number in (2, 0)] == [0, 1]


def test_a_round_in_which_nothing_was_asked_for_changes_nothing() -> None:
    foresight = Foresight()
    for number in (0, 5):
        foresight.asked(number, newest=9)
    foresight.new_round()
    foresight.new_round()
    assert foresight.after(0) == 5


def test_what_followed_across_two_rounds_is_not_expected() -> None:
    foresight = Foresight()
    foresight.asked(3, newest=9)
    foresight.new_round()
    foresight.asked(9, newest=9)
    foresight.new_round()
    assert foresight.after(3) == 2


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_what_was_asked_for_while_it_was_among_the_newest_stays_in_the_next_round(
    ahead: int,
) -> None:
    foresight = Foresight(ahead)
    for number in (4, 3, 2, 1, 0):
        foresight.asked(number, newest=4)
    assert not any(foresight.stays(number) for number in range(5))
    foresight.new_round()
    assert [number for number in range(5) if foresight.stays(number)] == list(range(4 - ahead, 5))


def test_an_order_is_known_once_there_was_a_round() -> None:
    foresight = Foresight()
    foresight.asked(1, newest=1)
    foresight.asked(0, newest=1)
    assert not foresight.has_seen_a_round
    foresight.new_round()
    assert foresight.has_seen_a_round
