"""What followed what in the last round is expected to follow it again."""

from __future__ import annotations

from backstash.stash.foresight import Foresight


def test_before_there_was_a_round_the_last_in_is_expected_first_out() -> None:
    foresight = Foresight()
    assert foresight.after(7) == 6


def test_the_order_of_the_last_round_is_expected_again() -> None:
    foresight = Foresight()
    assert [foresight.asked(number) for number in (2, 0, 0, 1)] == [True, True, False, True]
    assert foresight.after(2) == 1  # this round's order is not known before it has ended
    foresight.new_round()
    assert [foresight.after(number) for number in (2, 0)] == [0, 1]


def test_a_round_in_which_nothing_was_asked_for_changes_nothing() -> None:
    foresight = Foresight()
    for number in (0, 5):
        foresight.asked(number)
    foresight.new_round()
    foresight.new_round()
    assert foresight.after(0) == 5


def test_what_followed_across_two_rounds_is_not_expected() -> None:
    foresight = Foresight()
    foresight.asked(3)
    foresight.new_round()
    foresight.asked(9)
    foresight.new_round()
    assert foresight.after(3) == 2
