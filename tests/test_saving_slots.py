"""Putting values together again refuses what changed since, and what did not come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import backstash as bs
from backstash.saving import slots
from saving_cases import BY_REFERENCE, HOOKS, ROUTES, Carrier, leaf, values_2d

each_hook = pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)


@pytest.mark.parametrize("make", BY_REFERENCE.values(), ids=BY_REFERENCE)
@each_hook
def test_an_in_place_change_of_what_is_kept_by_reference_is_an_error(
    hook: Callable[[], Any], make: Callable[[], Any]
) -> None:
    value = make()
    with hook():
        y = Carrier(value)(leaf()).sum()
    with torch.no_grad():
        value.mul_(2)
    with pytest.raises(bs.ModifiedError, match="modified in place") as caught:
        y.backward()
    assert isinstance(caught.value, RuntimeError)


def test_an_in_place_change_among_many_parameters_names_the_one() -> None:
    parameters = [nn.Parameter(torch.ones(n)) for n in range(1, 30)]
    y = Carrier(*parameters, values_2d())(leaf()).sum()
    with torch.no_grad():
        parameters[12].add_(1)
    with pytest.raises(bs.ModifiedError, match=r"\(13,\)"):
        y.backward()


def test_a_change_before_saving_is_no_error() -> None:
    weight = nn.Parameter(values_2d())
    with torch.no_grad():
        weight.mul_(2)
    (carrier := Carrier(weight))(leaf()).sum().backward()
    carrier.check()


def test_a_buffer_of_a_quantized_tensor_changed_in_place_is_an_error() -> None:
    q = bs.MXFP8.quantize(values_2d())
    y = Carrier(q)(leaf()).sum()
    q.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("given", [0, 1, 3])
@pytest.mark.parametrize("with_parameter", [False, True], ids=["plain", "with_parameter"])
def test_a_wrong_number_of_tensors_is_an_error(given: int, with_parameter: bool) -> None:
    extra = [nn.Parameter(torch.ones(1))] if with_parameter else []
    tensors, records = bs.prepare_for_saving(torch.ones(1), *extra, torch.ones(2))
    assert len(tensors) == 2
    with pytest.raises(bs.ShapeError, match="2 tensors were prepared for saving"):
        bs.restore_from_saved(records, [torch.ones(1)] * given)


class Mesh:
    """Something beside the buffers that is no tensor and cannot be copied."""


class Placed(TwoTensor):
    """A foreign wrapper that lists more than its buffers."""

    mesh: Mesh

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["a", "b", "mesh"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], *meta: Any) -> Placed:
        return Placed.on(inner["mesh"], inner["a"], inner["b"])

    @staticmethod
    def on(mesh: Mesh, a: Tensor, b: Tensor) -> Placed:
        placed = Placed(a, b)
        placed.mesh = mesh
        return placed


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_what_a_wrapper_lists_beside_its_buffers_comes_back_as_itself(
    route: Callable[..., Tensor],
) -> None:
    placed = Placed.on(Mesh(), values_2d(), values_2d())
    carrier = Carrier(placed)
    route(carrier, leaf()).sum().backward()
    ((restored,),) = carrier.restored
    assert type(restored) is Placed
    assert restored.mesh is placed.mesh
    assert torch.equal(restored.a, placed.a)


def test_a_wrapper_with_more_than_buffers_can_be_metered() -> None:
    placed = Placed.on(Mesh(), values_2d(), values_2d())
    meter = bs.Meter()
    meter.pack(placed, None)
    assert meter.bytes == placed.a.nbytes + placed.b.nbytes


@pytest.mark.parametrize("records", [None, 3, ()], ids=repr)
def test_restoring_from_what_are_no_records_is_an_error(records: Any) -> None:
    with pytest.raises(bs.NothingSavedError, match="records first"):
        bs.restore_from_saved(records, (torch.ones(1),))


@pytest.mark.parametrize("tensors", [None, 3, torch.ones(1)], ids=repr)
@pytest.mark.parametrize("value", [torch.ones(1), nn.Parameter(torch.ones(1))], ids=repr)
def test_restoring_from_no_sequence_is_an_error(value: Tensor, tensors: Any) -> None:
    _, records = bs.prepare_for_saving(value)
    with pytest.raises(bs.DtypeError, match="sequence of tensors"):
        bs.restore_from_saved(records, tensors)


def test_a_list_restores_as_a_tuple_does() -> None:
    tensors, records = bs.prepare_for_saving(torch.ones(1), torch.ones(2))
    assert bs.restore_from_saved(records, list(tensors)) == tensors


def test_a_buffer_that_a_hook_lost_is_an_error() -> None:
    _, records = bs.prepare_for_saving(TwoTensor(torch.ones(1), torch.ones(1)))
    with pytest.raises(bs.ShapeError, match="came back as None"):
        bs.restore_from_saved(records, [torch.ones(1), None])


class Marked(Tensor):
    """A distributed weight of somebody else, which its class says it is."""

    is_distributed_weight = True


class Claims(nn.Parameter):
    """A parameter that says only when it is asked whether it is distributed."""

    is_distributed_weight = property(lambda self: True)


@pytest.mark.parametrize("kind", [nn.Parameter, Marked, Claims], ids=lambda kind: kind.__name__)
def test_weights_of_a_group_share_one_record_whatever_their_class(kind: Any) -> None:
    plain = [torch.randn(2, 2) for _ in range(2)]
    weights = [x.as_subclass(kind) if kind is Marked else kind(x) for x in plain]
    values = (values_2d(), *weights, None)
    tensors, records = bs.prepare_for_saving(*values)
    assert type(records) is slots.WithParameters
    assert len(tensors) == 2
    restored = bs.restore_from_saved(records, tensors)
    assert all(a is b for a, b in zip(restored, values, strict=True))


def test_only_plain_rows_saved_inside_of_saving_may_come_back_in_pages() -> None:
    values = (
        values_2d(),
        bs.GroupedTensor(values_2d(), torch.tensor([1])),
        bs.MXFP8.quantize(values_2d()),
        nn.Parameter(values_2d()),
        None,
    )
    _, records = bs.prepare_for_saving(*values)
    assert [records.place_of(i) for i in range(5)] == [None] * 5
    with bs.saving(bs.Meter()):
        tensors, records = bs.prepare_for_saving(*values)
    places = [records.place_of(i) for i in range(5)]
    assert places[2:] == [None] * 3
    assert [tensors[place] is not None for place in places[:2] if place is not None] == [True] * 2
    assert tensors[places[1] or 0] is values[1].data
    # Without groups nothing is looked at one by one.
    with bs.saving(bs.Meter()):
        _, records = bs.prepare_for_saving(values_2d())
    assert records.place_of(0) is None
