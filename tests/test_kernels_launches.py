"""What was compiled once is launched again for the same kind of arguments, and for no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backstash.kernels.launches import Launcher


class Kernel:
    """A kernel that notes what is asked of Triton, and what is launched of what it compiled."""

    arg_names = ("x", "n", "B", "C")

    def __init__(self, *, is_interpreted: bool = False) -> None:
        self.asked: list[Any] = []
        self.launched: list[Any] = []
        self.is_interpreted = is_interpreted

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compiled(*args: Any) -> None:
            self.launched.append((grid, args))

        def ask(*args: Any, **constants: Any) -> Any:
            self.asked.append((grid, args, constants))
            return None if self.is_interpreted else self

        return compiled if len(grid) == 3 else ask


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Kernel()


X = torch.zeros(64)


def test_the_first_launch_is_tritons_own_and_the_next_is_of_what_it_compiled(kernel):
    launch, y = Launcher(kernel), torch.zeros(128)
    launch(7, X, 32, C=5, B=3, num_warps=4)
    launch(9, y, 48, C=5, B=3, num_warps=4)
    assert kernel.asked == [((7,), (X, 32), {"C": 5, "B": 3, "num_warps": 4})]
    ((grid, args),) = kernel.launched
    assert grid == (9, 1, 1)
    assert args[0] is y
    assert args[1:] == (48, 3, 5)


OTHERS = {
    "dtype": (X.half(), 32, 3),
    "address": (X[1:], 32, 3),
    "none": (None, 32, 3),
    "one": (X, 1, 3),
    "no-sixteens": (X, 33, 3),
    "large": (X, 2**31, 3),
    "constant": (X, 32, 4),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_triton_is_asked_again_where_it_may_compile_something_else(kernel, other):
    launch = Launcher(kernel)
    for x, n, block in ((X, 32, 3), other, (X, 32, 3), other):
        launch(1, x, n, B=block, C=0)
    assert len(kernel.asked) == len(kernel.launched) == 2


def test_triton_is_asked_again_on_another_device(kernel, monkeypatch):
    launch = Launcher(kernel)
    for device in (0, 1, 0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda at=device: at)
        launch(1, X, 32, B=3, C=0)
    assert len(kernel.asked) == len(kernel.launched) == 2


def test_of_a_tuple_each_is_looked_at(kernel):
    launch = Launcher(kernel)
    for xs in ((X, X), (X[4:], X), (X, X[1:]), (X, X, X), (X, None)):
        launch(1, xs, (33, 33), B=3, C=0)
    assert len(kernel.asked) == 4
    launch(1, (X, X), (33, 2**40), B=3, C=0)
    assert len(kernel.asked) == 5


def test_what_says_its_kind_is_told_apart_by_it(kernel):
    class Described:
        def __init__(self, kind: Any) -> None:
            self.kind = kind

    launch = Launcher(kernel)
    for kind in ("a", "a", "b"):
        launch(1, Described(kind), 32, B=3, C=0)
    assert len(kernel.asked) == 2


def test_an_interpreted_kernel_is_asked_each_time(kernel):
    kernel.is_interpreted = True
    launch = Launcher(kernel)
    for _ in range(2):
        launch(1, X, 32, B=3, C=0)
    assert len(kernel.asked) == 2
    assert not kernel.launched
