"""What is saved comes back: the same object where it is kept by reference, else an equal one."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.two_tensor import TwoTensor

import backstash as bs
from backstash.saving import taken_values
from saving_cases import (
    BY_REFERENCE,
    BY_VALUE,
    COLUMNS,
    COUNTS,
    HOOKS,
    ROUTES,
    ROWS,
    VALUES,
    Carrier,
    Declining,
    grad_of,
    identity,
    leaf,
    rounding,
    same,
    values_2d,
)

each_value = pytest.mark.parametrize("make", VALUES.values(), ids=VALUES)
each_route = pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
each_hook = pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)


@each_value
@each_route
def test_a_value_comes_back_by_every_route(
    route: Callable[..., Tensor], make: Callable[[], Any]
) -> None:
    carrier = Carrier(make())
    route(carrier, x := leaf()).sum().backward()
    carrier.check()
    assert torch.equal(grad_of(x), torch.full((3,), 2.0))


@pytest.mark.parametrize("make", BY_REFERENCE.values(), ids=BY_REFERENCE)
@each_route
def test_what_is_kept_by_reference_comes_back_as_itself(
    route: Callable[..., Tensor], make: Callable[[], Any]
) -> None:
    carrier = Carrier(values_2d(), value := make())
    route(carrier, leaf()).sum().backward()
    assert [restored[1] is value for restored in carrier.restored] == [True]


@pytest.mark.parametrize("make", BY_REFERENCE.values(), ids=BY_REFERENCE)
def test_no_hook_sees_what_is_kept_by_reference(make: Callable[[], Any]) -> None:
    handler = Declining()
    with bs.saving(handler):
        Carrier(make())(leaf())
    assert handler.seen == []


@each_route
def test_all_values_together_come_back_in_order(route: Callable[..., Tensor]) -> None:
    carrier = Carrier(*(make() for make in VALUES.values()))
    route(carrier, leaf()).sum().backward()
    carrier.check()


@each_route
def test_a_retained_graph_gives_the_values_again(route: Callable[..., Tensor]) -> None:
    carrier = Carrier(*(make() for make in VALUES.values()))
    y = route(carrier, leaf()).sum()
    for _ in range(3):
        y.backward(retain_graph=True)
    carrier.check()
    assert len(carrier.restored) == 3


@each_value
@each_hook
def test_saving_leaves_the_callers_object_as_it_was(
    hook: Callable[[], Any], make: Callable[[], Any]
) -> None:
    value = make()
    attributes = dict(getattr(value, "__dict__", {}))
    before = value.data if isinstance(value, bs.GroupedTensor) else value
    before = None if before is None else before.detach().clone()
    with hook():
        Carrier(value)(leaf()).sum().backward()
    after = value.data if isinstance(value, bs.GroupedTensor) else value
    assert same(before, None if after is None else after.detach())
    assert attributes == dict(getattr(value, "__dict__", {}))


@each_value
@each_hook
def test_a_value_given_twice_is_saved_once_and_comes_back_as_one_object(
    hook: Callable[[], Any], make: Callable[[], Any]
) -> None:
    value = make()
    once, _ = bs.prepare_for_saving(value)
    with hook():
        twice, _ = bs.prepare_for_saving(value, value)
        carrier = Carrier(value, None, values_2d(), value)
        carrier(leaf()).sum().backward()
    if value is not None:
        assert len(twice) == len(once)
    ((first, _, _, last),) = carrier.restored
    assert first is last
    carrier.check()


def test_a_tensor_given_twice_among_many_comes_back_as_one_object() -> None:
    many = [values_2d() for _ in range(40)]
    with identity():
        carrier = Carrier(*many, many[3])
        carrier(leaf()).sum().backward()
    assert carrier.restored[0][3] is carrier.restored[0][-1]
    carrier.check()


def test_buffers_that_values_share_are_saved_once() -> None:
    grouped = bs.GroupedTensor.from_counts(values_2d(), COUNTS)
    tensors, records = bs.prepare_for_saving(grouped, grouped.data, grouped.ends_G)
    assert len(tensors) == 3  # data, ends, overflow
    back, data, ends_G = bs.restore_from_saved(records, tensors)
    assert data is back.data
    assert ends_G is back.ends_G


@pytest.mark.parametrize("format", [bs.FLOAT8_CURRENT, bs.MXFP8], ids=lambda f: f.name)
@pytest.mark.parametrize("buffer_first", [False, True], ids=["tensor_first", "buffer_first"])
def test_a_buffer_given_beside_its_tensor_keeps_its_dtype(
    format: bs.Format, buffer_first: bool
) -> None:
    q = format.quantize(values_2d())
    for buffer in q.buffers.values():
        pair = (buffer, q) if buffer_first else (q, buffer)
        carrier = Carrier(*pair)
        with rounding():
            carrier(leaf()).sum().backward()
        exact = 1 if buffer_first else 0
        assert same(pair[exact], carrier.restored[0][exact])
        assert carrier.restored[0][1 - exact].dtype == buffer.dtype


QUANTIZED = {name: make for name, make in BY_VALUE.items() if "8" in name or "codes" in name}


@pytest.mark.parametrize("make", QUANTIZED.values(), ids=QUANTIZED)
def test_a_hook_that_rounds_floats_leaves_codes_and_scales_alone(make: Callable[[], Any]) -> None:
    carrier = Carrier(make())
    with rounding():
        carrier(leaf()).sum().backward()
    carrier.check()


@pytest.mark.parametrize("make", QUANTIZED.values(), ids=QUANTIZED)
def test_hooks_see_codes_and_scales_as_bytes(make: Callable[[], Any]) -> None:
    handler = Declining()
    with bs.saving(handler):
        Carrier(make())(leaf())
    assert handler.seen
    assert {t.dtype for t in handler.seen} <= {torch.uint8, torch.int32, torch.bool}


class FreshInner(TwoTensor):
    """A foreign wrapper whose buffers are made anew each time they are asked for."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return value.clone() if name in ("a", "b") else value


def test_buffers_that_are_made_when_asked_for_are_not_mixed_up() -> None:
    tensors = [
        FreshInner(*(torch.full((2,), float(i + j)).to(torch.float8_e4m3fn) for j in (0, 8)))
        for i in range(6)
    ]
    carrier = Carrier(*tensors)
    with identity():
        carrier(leaf()).sum().backward()
    for saved, restored in zip(tensors, carrier.restored[0], strict=True):
        assert torch.equal(saved.a.float(), restored.a.float())
        assert torch.equal(saved.b.float(), restored.b.float())


@pytest.mark.parametrize("how", ["expression", "statement"])
def test_keep_identity_works_as_statement_and_as_expression(how: str) -> None:
    x = values_2d().requires_grad_()
    kept = bs.keep_identity(x)
    carrier = Carrier(kept if how == "expression" else x)
    with identity():
        carrier(leaf()).sum().backward()
    assert carrier.restored[0][0] is x


def test_keep_identity_of_a_tensor_ends_with_the_tensor() -> None:
    reference = weakref.ref(bs.keep_identity(values_2d()))
    assert reference() is None
    other = values_2d()
    carrier = Carrier(other)
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        carrier(leaf()).sum().backward()
    assert carrier.restored[0][0] is not other


def _buffers(value: Any) -> list[Tensor]:
    tensors, _ = bs.prepare_for_saving(value)
    return [t for t in tensors if t is not None]


FREEABLE = {name: make for name, make in BY_VALUE.items() if name != "none"}


@pytest.mark.parametrize("end", ["backward", "dropped"])
@pytest.mark.parametrize("make", FREEABLE.values(), ids=FREEABLE)
@each_hook
def test_buffers_are_freed_with_the_graph(
    hook: Callable[[], Any], make: Callable[[], Any], end: str
) -> None:
    gc.disable()
    try:
        value = make()
        storages = [weakref.ref(b.untyped_storage()) for b in _buffers(value)]
        references = [weakref.ref(b) for b in _buffers(value) if b is value]
        with hook():
            y = Carrier.__call__(_Forgetful(value), x := leaf())
        del value
        if end == "backward":
            y.sum().backward()
        else:
            del y
        assert [r() for r in references] == [None] * len(references)
        assert [s() for s in storages] == [None] * len(storages)
        del x
    finally:
        gc.enable()


class _Forgetful(Carrier):
    """Lets go of its values when they are saved, and of what it is given back."""

    @property
    def values(self) -> tuple[Any, ...]:
        values, self._values = self._values, ()
        return values

    @values.setter
    def values(self, values: tuple[Any, ...]) -> None:
        self._values = values

    @property
    def restored(self) -> list[tuple[Any, ...]]:
        return []

    @restored.setter
    def restored(self, nothing: list[Any]) -> None:
        pass


def test_each_buffer_is_unpacked_once_for_each_backward() -> None:
    unpacked = 0

    def unpack(tensor: Tensor) -> Tensor:
        nonlocal unpacked
        unpacked += 1
        return tensor

    values = [make() for make in VALUES.values()]
    buffers = len([t for t in bs.prepare_for_saving(*values)[0] if t is not None])
    carrier = Carrier(*values)
    with saved_tensors_hooks(lambda t: t, unpack):
        y = carrier(leaf()).sum()
    for backward in (1, 2, 3):
        y.backward(retain_graph=True)
        assert unpacked == backward * buffers


def test_backward_in_another_thread_finds_the_values() -> None:
    carrier = Carrier(*(make() for make in VALUES.values()))
    with identity():
        y = carrier(leaf()).sum()
    thread = threading.Thread(target=y.backward)
    thread.start()
    thread.join()
    carrier.check()


@pytest.mark.parametrize("value", [3, "x", [torch.ones(1)], object()], ids=lambda v: repr(type(v)))
@pytest.mark.parametrize("beside", [(), (None,), (torch.ones(1),)], ids=["alone", "none", "plain"])
def test_what_is_no_tensor_cannot_be_saved(value: Any, beside: tuple[Any, ...]) -> None:
    with pytest.raises(bs.DtypeError, match="only tensors"):
        bs.prepare_for_saving(*beside, value)


def test_a_context_on_which_nothing_was_saved_is_an_error() -> None:
    class Bare:
        saved_tensors = ()

    with pytest.raises(bs.NothingSavedError, match="save_for_backward") as caught:
        bs.saved_values(Bare())
    assert isinstance(caught.value, AttributeError)
    assert bs.restore_from_func_ctx is bs.saved_values


@pytest.mark.parametrize("ctx", [None, 3, torch.ones(1)], ids=repr)
def test_saving_for_what_is_no_context_is_an_error(ctx: Any) -> None:
    with pytest.raises(bs.ConfigError, match=r"ctx of an autograd\.Function"):
        bs.save_for_backward(ctx, torch.ones(1))


def test_keep_identity_of_what_is_no_tensor_is_an_error() -> None:
    with pytest.raises(bs.DtypeError, match="keep_identity"):
        bs.keep_identity("weight")  # pyright: ignore[reportArgumentType]


def test_a_second_backward_through_a_freed_graph_is_an_error() -> None:
    y = Carrier(nn.Parameter(torch.ones(1)), values_2d())(leaf()).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


@pytest.mark.parametrize("retain", [False, True], ids=["freed", "retained"])
def test_values_that_are_taken_go_with_whoever_took_them(retain: bool) -> None:
    found = []

    class Taking(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            bs.save_for_backward(ctx, x * 2)
            return x * 3

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            (twice,), is_last = taken_values(ctx)
            values, alive = twice.tolist(), weakref.ref(twice)
            del twice
            found.append((values, is_last, alive() is None))
            return 3 * grads[0]

    y = Taking.apply(x := leaf()).sum()
    y.backward(retain_graph=retain)
    if retain:
        y.backward()
    each = [(x.detach() * 2).tolist(), True, True]
    assert found == [(each[0], False, False)] * retain + [tuple(each)]


def test_double_backward_where_it_is_not_defined_is_an_error() -> None:
    x = leaf()
    y = Carrier(values_2d())(x).square().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_nothing_saved_is_nothing_restored() -> None:
    tensors, records = bs.prepare_for_saving()
    assert (tensors, bs.restore_from_saved(records, tensors)) == ((), ())


def test_sizes_of_the_cases_are_awkward() -> None:
    assert (ROWS % 32, COLUMNS % 32, 0 in COUNTS) == (5, 5, True)
