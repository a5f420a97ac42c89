"""The first Ctrl-C waits for the step, the second does not."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from backstash.train.interrupt import Interrupt


@pytest.fixture(autouse=True)
def usual_ctrl_c() -> Iterator[None]:
    """As in a terminal: what runs in the background of a script ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press(number: signal.Signals = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_only_a_wish(number: signal.Signals) -> None:
    with Interrupt() as interrupt:
        assert not interrupt.requested
        press(number)
        assert interrupt.requested


def test_the_second_ctrl_c_ends_it() -> None:
    with Interrupt() as interrupt:
        press()
        with pytest.raises(KeyboardInterrupt):
            press()
        assert interrupt.requested


def test_handlers_are_put_back_also_after_an_exception() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), Interrupt():
        raise ZeroDivisionError
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_in_another_thread_it_does_nothing() -> None:
    found: list[bool] = []

    def work() -> None:
        with Interrupt() as interrupt:
            found.append(interrupt.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False]
