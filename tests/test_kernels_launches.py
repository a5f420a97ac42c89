"""What was compiled once is launched again for the same kind of arguments, and for no other."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", minversion="3.6")
launches = importlib.import_module("backstash.kernels.launches")
Launcher = launches.Launcher
STREAM = 77


class Kernel:
    """A kernel that notes what is asked of Triton, and what is launched of what it compiled."""

    arg_names = ("x", "n", "B", "C")
    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.launched: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def ask(*args: Any, **constants: Any) -> Any:
            self.asked.append((grid, args, constants))
            return self

        return ask

    def run(self, *args: Any) -> None:
        self.launched.append(args)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    active = SimpleNamespace(get_current_stream=lambda device: STREAM + device)
    monkeypatch.setattr(launches, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launches, "current_gpu", lambda: 0)
    return Kernel()


X = torch.zeros(64)


def test_the_first_launch_is_tritons_own_and_the_next_is_of_what_it_compiled(kernel):
    launch, y = Launcher(kernel), torch.zeros(128)
    launch(7, X, 32, C=5, B=3, num_warps=4)
    launch(9, y, 48, C=5, B=3, num_warps=4)
    assert kernel.asked == [((7,), (X, 32), {"C": 5, "B": 3, "num_warps": 4})]
    ((*first, x, n, block, c),) = kernel.launched
    assert first == [9, 1, 1, STREAM, "function", "metadata", None, None, None]
    assert (x, n, block, c) == (y.data_ptr(), 48, 3, 5)


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
        monkeypatch.setattr(launches, "current_gpu", lambda at=device: at)
        launch(1, X, 32, B=3, C=0)
    assert len(kernel.asked) == 2
    assert [args[3] for args in kernel.launched] == [STREAM, STREAM + 1]


def test_of_a_tuple_each_is_looked_at(kernel):
    launch = Launcher(kernel)
    for xs in ((X, X), (X[4:], X), (X, X[1:]), (X, X, X), (X, None)):
        launch(1, xs, (33, 33), B=3, C=0)
    assert len(kernel.asked) == 4
    launch(1, (X, X), (33, 2**40), B=3, C=0)
    assert len(kernel.asked) == 5
    launch(1, (X, X), (33, 33), B=3, C=0)
    assert kernel.launched[-1][-4:-2] == ((X.data_ptr(), X.data_ptr()), (33, 33))


def test_a_parameter_is_a_tensor_like_any_other(kernel):
    launch = Launcher(kernel)
    for x in (X, torch.nn.Parameter(X), X):
        launch(1, x, 32, B=3, C=0)
    assert len(kernel.asked) == 1
    assert [args[-4] for args in kernel.launched] == [X.data_ptr()] * 2


@pytest.mark.gpu
def test_a_tensor_on_the_host_is_refused_also_after_one_on_the_gpu():
    permute = importlib.import_module("backstash.kernels.permutation").permute
    x, source = torch.ones(4, 8, device="cuda"), torch.zeros(4, dtype=torch.int64)
    assert permute(x, source.cuda()).eq(1).all()
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        permute(x, source)


def test_what_says_its_kind_is_told_apart_by_it(kernel):
    class Described:
        def __init__(self, kind: Any) -> None:
            self.kind = kind

    launch = Launcher(kernel)
    for kind in ("a", "a", "b"):
        launch(1, Described(kind), 32, B=3, C=0)
    assert len(kernel.asked) == 2


def test_any_float_is_like_any_other(kernel):
    launch = Launcher(kernel)
    for value in (0.5, 1.5):
        launch(1, value, 32, B=3, C=0)
    assert len(kernel.asked) == len(kernel.launched) == 1


def test_who_watches_launches_sees_each_of_them(kernel, monkeypatch):
    launch = Launcher(kernel)
    launch(1, X, 32, B=3, C=0)
    chain = launches.knobs.HookChain()
    monkeypatch.setattr(launches.knobs.runtime, "launch_enter_hook", chain)
    for watches, wanted in ((False, 1), (True, 2), (False, 2)):
        chain.calls = [print] if watches else []
        launch(1, X, 32, B=3, C=0)
        assert len(kernel.asked) == wanted
    assert len(kernel.launched) == 2


def test_an_interpreted_kernel_is_asked_each_time(kernel, monkeypatch):
    monkeypatch.setattr(launches.knobs.runtime, "interpret", True)
    launch = Launcher(kernel)
    for _ in range(2):
        launch(1, X, 32, B=3, C=0)
    assert len(kernel.asked) == 2
    assert not kernel.launched
