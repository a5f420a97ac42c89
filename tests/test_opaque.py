"""Pieces that are not compiled: right under the compiler, and free where there is none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from backstash import opaque as under_test
from backstash.opaque import opaque


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(params=["before the compiler is there", "afterwards"])
def decorate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``opaque`` for a function that is decorated before the compiler is imported, or later."""

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        with monkeypatch.context() as context:
            if request.param != "afterwards":
                context.delitem(sys.modules, "torch._dynamo", raising=False)
            return opaque(reason="this piece counts")(function)

    return decorated


class Counted:
    """A function with a part that counts how often it was really run, or traced."""

    def __init__(self, decorate: Callable[..., Any]) -> None:
        self.runs = self.traced = 0
        self.piece = decorate(self.unknown)

    def unknown(self, x: Tensor) -> Tensor:
        self.runs += 1
        self.traced += torch.compiler.is_compiling()
        return self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        self.traced += torch.compiler.is_compiling()
        return x * self.runs

    def whole(self, x: Tensor) -> Tensor:
        return self.piece(x.sin()).cos()


def compiled(function: Any, graphs: list[Any], **options: Any) -> Any:
    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    return torch.compile(function, backend=backend, **options)


def test_only_what_is_around_is_compiled(decorate: Callable[..., Any]) -> None:
    counted, graphs, x = Counted(decorate), [], torch.ones(3)
    run = compiled(counted.whole, graphs)
    for turn in (1, 2, 3):
        assert torch.equal(run(x), (x.sin() * turn).cos())
    assert (counted.runs, counted.traced) == (3, 0)
    names = [node.name for graph in graphs for node in graph.graph.nodes if node.op != "output"]
    assert any("sin" in name for name in names)
    assert any("cos" in name for name in names)
    assert not any("mul" in name for name in names)


def test_a_piece_that_is_called_where_the_compiler_fell_back_is_not_compiled(
    decorate: Callable[..., Any],
) -> None:
    counted, graphs, x = Counted(decorate), [], torch.ones(3)
    calls: dict[str, Callable[..., Any]] = {"piece": counted.piece}

    def broken(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return calls["piece"](x)

    run = compiled(broken, graphs)
    for turn in (1, 2):
        assert torch.equal(run(x), x * turn)
    assert (counted.runs, counted.traced) == (2, 0)
    assert graphs == []


def test_where_no_piece_is_allowed_the_reason_is_said(decorate: Callable[..., Any]) -> None:
    run = compiled(Counted(decorate).whole, [], fullgraph=True)
    with pytest.raises(RuntimeError, match="this piece counts"):
        run(torch.ones(3))


def test_a_torch_that_cannot_be_told_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "_frames", object())
    counted, graphs = Counted(opaque(reason="this piece counts")), []
    assert torch.equal(compiled(counted.whole, graphs)(torch.ones(3)), torch.ones(3).sin().cos())
    assert (counted.runs, counted.traced) == (1, 0)


def test_what_is_decorated_keeps_its_name_and_its_words() -> None:
    @opaque(reason="it counts")
    def piece(x: Tensor) -> Tensor:
        """What it does."""
        return x

    assert (piece.__name__, piece.__doc__) == ("piece", "What it does.")


def test_neither_the_package_nor_a_layer_of_it_imports_the_compiler() -> None:
    program = """
import sys, torch
import backstash as bs
with bs.autocast(recipe="mxfp8"):
    bs.MoE(32, 32, num_experts=2, top_k=1)(torch.ones(3, 32)).sum().backward()
print(*(name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("", 0), done.stderr
