"""``saving``: handlers are asked in order, contexts nest and end in any order, nothing leaks."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import backstash as bs
from backstash.saving import saving
from saving_cases import (
    HOOKS,
    Declining,
    Keeper,
    copying,
    detaching,
    grad_of,
    hook_stack_is_empty,
    identity,
    nest,
)


def network(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(F.silu(x @ w).exp() @ w).square().sum()


def leaves() -> tuple[Tensor, nn.Parameter]:
    torch.manual_seed(0)
    return torch.randn(7, 5, requires_grad=True), nn.Parameter(torch.randn(5, 5) / 8)


def gradients(y: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(y, (x, w)))


def expected() -> list[Tensor]:
    x, w = leaves()
    return gradients(network(x, w), x, w)


def agree(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.fixture(autouse=True)
def no_hooks_are_left() -> Any:
    assert hook_stack_is_empty()
    yield
    assert hook_stack_is_empty()


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_gradients_are_bit_equal_under_every_hook(hook: Callable[[], Any]) -> None:
    x, w = leaves()
    with hook():
        y = network(x, w)
    assert agree(gradients(y, x, w), expected())


def test_the_first_handler_that_accepts_keeps_the_tensor() -> None:
    first, second, third = Declining(), Keeper(), Keeper()
    x, w = leaves()
    with saving(first, second, third):
        y = network(x, w)
    assert len(first.seen) == second.packed > 0
    assert third.packed == 0
    assert agree(gradients(y, x, w), expected())
    assert (second.unpacked, third.unpacked) == (second.packed, 0)


def test_a_handler_may_choose() -> None:
    class Large(Keeper):
        def pack(self, tensor: Tensor, rows: Tensor | None) -> Any:
            return super().pack(tensor, rows) if tensor.numel() == 7 else None

    inner, outer = Large(), Keeper()
    with saving(outer), saving(inner):
        torch.ones(7, requires_grad=True).exp()
        torch.ones(8, requires_grad=True).exp()
    assert (inner.packed, outer.packed) == (1, 1)


def test_a_falsy_handle_is_a_handle() -> None:
    class Numbered(Keeper):
        def pack(self, tensor: Tensor, rows: Tensor | None) -> int:
            return 0

        def unpack(self, handle: int) -> Tensor:
            return torch.full((2,), 3.0)

    x = torch.ones(2, requires_grad=True)
    with saving(Numbered()):
        y = x.exp()
    y.sum().backward()
    assert torch.equal(grad_of(x), torch.full((2,), 3.0))


def test_what_is_declined_goes_to_the_hooks_around() -> None:
    seen: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t)
    x, w = leaves()
    with hooks, saving(Declining()), saving(Declining()):
        y = network(x, w)
    with_weights = len(seen)
    assert with_weights > 0
    assert agree(gradients(y, x, w), expected())
    seen.clear()
    with hooks, saving(Keeper()):
        network(x, w)
    # Weights are offered to no handler, and go on to hooks that are not ours.
    assert with_weights > len(seen) > 0


WEIGHTS: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "itself": lambda w: w,
    "transposed": lambda w: w.t(),
    "view_of_view": lambda w: w.view(25).view(5, 5).t(),
}


@pytest.mark.parametrize("view", WEIGHTS.values(), ids=WEIGHTS)
def test_parameters_and_views_of_them_are_not_offered(
    view: Callable[[nn.Parameter], Tensor],
) -> None:
    x, w = leaves()
    handler = Declining()
    with saving(handler):
        _ = x @ view(w)
    storages = {t.untyped_storage().data_ptr() for t in handler.seen}
    assert w.untyped_storage().data_ptr() not in storages


@pytest.mark.parametrize("hook", ["declining", "meter", "second_accepts", "outer_accepts"])
def test_an_in_place_change_of_a_declined_tensor_is_an_error(hook: str) -> None:
    x = torch.ones(3, requires_grad=True) * 1
    context = HOOKS[hook]() if "accepts" not in hook else saving(Declining(), Declining())
    with context:
        y = x.square()
    x.detach().add_(1)
    with pytest.raises(bs.ModifiedError, match="modified in place") as caught:
        y.sum().backward()
    assert isinstance(caught.value, RuntimeError)


def test_a_tensor_that_a_handler_keeps_may_be_changed_in_place() -> None:
    x = torch.full((3,), 2.0, requires_grad=True)
    h = x * 1
    with saving(Keeper()):
        y = h.square()
    h.detach().zero_()
    y.sum().backward()
    assert torch.equal(grad_of(x), torch.full((3,), 4.0))


@pytest.mark.parametrize("end", ["backward", "dropped"])
def test_handles_go_with_the_graph(end: str) -> None:
    class Handle:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    class Weak(Keeper):
        def __init__(self) -> None:
            super().__init__()
            self.handles: list[Any] = []

        def pack(self, tensor: Tensor, rows: Tensor | None) -> Any:
            handle = Handle(tensor.detach().clone())
            self.handles.append(weakref.ref(handle))
            return handle

        def unpack(self, handle: Handle) -> Tensor:
            return handle.tensor

    x, w = leaves()
    gc.disable()
    try:
        with saving(weak := Weak()):
            y = network(x, w)
        assert all(handle() is not None for handle in weak.handles)
        if end == "backward":
            y.backward()
        else:
            del y
        assert [handle() for handle in weak.handles] == [None] * len(weak.handles)
    finally:
        gc.enable()


def test_a_retained_graph_is_unpacked_again_and_an_output_makes_no_cycle() -> None:
    x, w = leaves()
    with saving(Declining()), saving(keeper := Keeper()):
        y = network(x, w)
    once = [g.clone() for g in torch.autograd.grad(y, (x, w), retain_graph=True)]
    assert agree(gradients(y, x, w), once)
    assert keeper.unpacked == 2 * keeper.packed
    output = weakref.ref(y)
    gc.disable()
    try:
        del y
        assert output() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "handler",
    [object(), Keeper, None, lambda t: t],
    ids=["an-object", "a-class", "nothing", "a-function"],
)
def test_what_is_no_handler_is_refused(handler: Any) -> None:
    with pytest.raises(bs.ConfigError, match="saving needs handlers"):
        saving(handler)


@pytest.mark.parametrize("where", ["in_the_body", "in_pack", "in_unpack"])
def test_an_exception_leaves_nothing_behind(where: str) -> None:
    class Broken(Keeper):
        def pack(self, tensor: Tensor, rows: Tensor | None) -> Any:
            if where == "in_pack":
                raise KeyError("broken")
            return super().pack(tensor, rows)

        def unpack(self, handle: Any) -> Tensor:
            raise KeyError("broken")

    def run() -> None:
        x, w = leaves()
        with saving(Declining()), saving(Broken()):
            y = network(x, w)
            if where == "in_the_body":
                raise KeyError("broken")
        y.backward()

    with pytest.raises(KeyError, match="broken"):
        run()
    assert hook_stack_is_empty()
    x, w = leaves()
    assert agree(gradients(network(x, w), x, w), expected())


def test_a_context_can_be_entered_again_inside_itself() -> None:
    context = saving(keeper := Keeper())
    with context:
        with context:
            torch.ones(2, requires_grad=True).exp()
        assert keeper.packed == 1
        torch.ones(2, requires_grad=True).exp()
        assert keeper.packed == 2
    torch.ones(2, requires_grad=True).exp()
    assert keeper.packed == 2


def test_contexts_may_be_left_in_the_order_in_which_they_were_entered() -> None:
    a, b = Keeper(), Keeper()
    one, other = saving(a), saving(b)

    def exp() -> tuple[int, int]:
        torch.ones(2, requires_grad=True).exp()
        return a.packed, b.packed

    one.__enter__()
    other.__enter__()
    assert exp() == (0, 1)
    one.__exit__()
    assert exp() == (0, 2)
    other.__exit__()
    assert exp() == (0, 2)
    assert hook_stack_is_empty()


def test_an_inner_context_passes_nothing_to_an_outer_that_was_left() -> None:
    outer_keeper = Keeper()
    outer, inner = saving(outer_keeper), saving(Declining())
    outer.__enter__()
    inner.__enter__()
    outer.__exit__()
    torch.ones(2, requires_grad=True).exp().sum().backward()
    inner.__exit__()
    assert outer_keeper.packed == 0


def test_leaving_in_another_thread_is_an_error() -> None:
    context = saving(Keeper())
    errors: list[BaseException] = []

    def leave() -> None:
        try:
            context.__exit__()
        except bs.ConfigError as error:
            errors.append(error)

    with context:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
    assert len(errors) == 1


KINDS: dict[str, Callable[[], Any]] = {
    "accepting": lambda: saving(Keeper()),
    "declining": lambda: saving(Declining()),
    "save_on_cpu": lambda: save_on_cpu(pin_memory=False),
    "identity": identity,
    "detaching": detaching,
    "copying": copying,
}


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=5),
    moves=st.lists(st.integers(0, 20), max_size=14),
)
def test_contexts_entered_and_left_in_any_order_leave_nothing(
    kinds: list[str], moves: list[int]
) -> None:
    want = expected()
    contexts = [KINDS[kind]() for kind in kinds]
    entered: list[Any] = []
    graphs: list[tuple[Tensor, Tensor, Tensor]] = []
    for move in moves:
        if entered and move % 2:
            entered.pop(move % len(entered)).__exit__(None, None, None)
        elif len(entered) < 6:
            entered.append(contexts[move % len(contexts)])
            entered[-1].__enter__()
        x, w = leaves()
        graphs.append((network(x, w), x, w))
    while entered:
        entered.pop(0).__exit__(None, None, None)
    assert hook_stack_is_empty()
    assert all(agree(gradients(*graph), want) for graph in graphs)


def test_threads_have_contexts_of_their_own() -> None:
    shared = saving(keeper := Keeper())
    barrier = threading.Barrier(3)
    wrong: list[str] = []

    def work(own: Keeper | None, x: Tensor, w: Tensor) -> None:
        for _ in range(20):
            barrier.wait()
            with shared, saving(own) if own else saving():
                y = network(x, w)
            if not hook_stack_is_empty():
                wrong.append("hooks left")
            if not agree(gradients(y, x, w), want):
                wrong.append("gradients")

    want = expected()
    own = [Keeper(), Keeper(), None]
    # Drawn here: threads that seed the one generator draw each other's numbers.
    threads = [threading.Thread(target=work, args=(k, *leaves())) for k in own]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert keeper.packed == keeper.unpacked == own[0].packed == own[1].packed > 0


def test_backward_may_run_in_another_thread() -> None:
    x, w = leaves()
    with saving(Declining(), keeper := Keeper()):
        y = network(x, w)
    thread = threading.Thread(target=y.backward)
    thread.start()
    thread.join()
    assert agree([grad_of(x), grad_of(w)], expected())
    assert keeper.unpacked == keeper.packed


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "without_reentry"])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "around"])
def test_handlers_work_with_checkpoint(inside: bool, reentrant: bool) -> None:
    x, w = leaves()
    keeper = Keeper()

    def region(x: Tensor) -> Tensor:
        with saving(keeper) if inside else nest():
            return network(x, w)

    with saving(keeper) if not inside else nest():
        y = checkpoint(region, x, use_reentrant=reentrant)
    assert isinstance(y, Tensor)
    y.backward()
    assert agree([grad_of(x), grad_of(w)], expected())
    assert keeper.packed > 0
