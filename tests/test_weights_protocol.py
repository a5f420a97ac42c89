"""A distributed weight is asked once for its group; a plain one is used as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from backstash.errors import DtypeError, ShapeError
from backstash.nn import GroupedLinear
from backstash.weights import (
    DistributedWeight,
    finalize_weight_grads,
    is_distributed_weight,
    materialize_weight_for_backward,
    materialize_weight_for_forward,
)

MATERIALIZE = [materialize_weight_for_forward, materialize_weight_for_backward]
DIRECTIONS = pytest.mark.parametrize("materialize", MATERIALIZE, ids=["forward", "backward"])


class Shard(torch.nn.Parameter):
    """A provider that answers what its test tells it to and writes down what it was asked."""

    is_distributed_weight = True

    def tell(self, answer: Any) -> Shard:
        self.answer, self.asked = answer, []
        return self

    def materialize_group_for_forward(self) -> Any:
        self.asked.append("forward")
        return self.answer

    def materialize_group_for_backward(self) -> Any:
        self.asked.append("backward")
        return self.answer

    def finalize_group_grads(self, wgrads: Any) -> Any:
        self.asked.append(wgrads)
        return self.answer

    def grad_buffer(self) -> Tensor:
        return torch.zeros(4, 2)


class NoTensor:
    is_distributed_weight = True


def shard(answer: Any = None) -> Shard:
    return Shard(torch.ones(2, 2)).tell(answer)


def test_a_provider_satisfies_the_protocol_and_a_plain_tensor_does_not() -> None:
    assert isinstance(shard(), DistributedWeight)
    assert not isinstance(torch.ones(2), DistributedWeight)


@pytest.mark.parametrize(
    "plain", [torch.ones(2), torch.nn.Parameter(torch.ones(2)), None, "weight"], ids=str
)
def test_only_a_marked_object_is_a_distributed_weight(plain: object) -> None:
    assert not is_distributed_weight(plain)
    assert is_distributed_weight(shard())


def test_a_marker_on_one_parameter_is_enough() -> None:
    weight: Any = torch.nn.Parameter(torch.ones(2, 2))
    weight.is_distributed_weight = True
    weight.materialize_group_for_forward = lambda: torch.zeros(4, 2)
    assert is_distributed_weight(weight)
    assert materialize_weight_for_forward(weight)[0].shape == (4, 2)


def test_a_marker_that_says_false_makes_a_plain_weight() -> None:
    weight: Any = torch.nn.Parameter(torch.ones(2, 2))
    weight.is_distributed_weight = False
    assert materialize_weight_for_forward(weight)[0] is weight


@pytest.mark.parametrize(
    "ask", [is_distributed_weight, *MATERIALIZE, lambda w: finalize_weight_grads(w, [None])]
)
def test_a_marked_object_that_is_no_tensor_is_a_type_error(ask: Any) -> None:
    with pytest.raises(TypeError, match=r"torch\.Tensor subclass, got NoTensor"):
        ask(NoTensor())


def test_a_marked_tensor_of_no_class_of_its_own_is_a_type_error() -> None:
    marked: Any = torch.ones(2)
    marked.is_distributed_weight = True
    with pytest.raises(TypeError, match=r"torch\.Tensor subclass, got Tensor"):
        is_distributed_weight(marked)


@DIRECTIONS
@pytest.mark.parametrize("count", [1, 4])
def test_plain_weights_come_back_as_the_same_objects(materialize: Any, count: int) -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]
    for asked in (weights, tuple(weights)):
        assert all(a is b for a, b in zip(materialize(asked), weights, strict=True))


@DIRECTIONS
def test_one_weight_may_be_given_bare_and_answers_as_a_list(materialize: Any) -> None:
    plain = torch.nn.Parameter(torch.ones(2))
    assert materialize(plain)[0] is plain
    full = torch.zeros(4, 2)
    assert materialize(shard(full))[0] is full
    assert materialize(shard([full]))[0] is full
    assert materialize([shard((full,))])[0] is full


@DIRECTIONS
def test_only_the_leader_of_a_group_is_asked_and_only_once(materialize: Any) -> None:
    full = [torch.full((4, 2), float(i)) for i in range(3)]
    group = [shard(full), shard(), shard()]
    answer = materialize(group)
    assert all(a is b for a, b in zip(answer, full, strict=True))
    assert [len(weight.asked) for weight in group] == [1, 0, 0]


@DIRECTIONS
@pytest.mark.parametrize("answer", [None, [torch.zeros(1)], torch.zeros(2, 1)])
def test_an_answer_for_too_few_of_the_group_is_refused(materialize: Any, answer: Any) -> None:
    with pytest.raises(ShapeError, match="each of the 2 weights of its group"):
        materialize([shard(answer), shard()])


def test_an_empty_list_of_weights_is_an_empty_list() -> None:
    assert materialize_weight_for_forward([]) == []
    assert finalize_weight_grads([], []) == []


def test_gradients_of_plain_weights_come_back_unchanged() -> None:
    weights, grads = [torch.ones(2)] * 2, [torch.ones(2), torch.zeros(2)]
    assert all(a is b for a, b in zip(finalize_weight_grads(weights, grads), grads, strict=True))
    assert finalize_weight_grads(weights[0], grads[0])[0] is grads[0]


def test_a_group_of_one_hands_over_a_bare_gradient() -> None:
    dummy = torch.zeros(2, 2)
    weight, grad = shard(dummy), torch.ones(4, 2)
    assert finalize_weight_grads([weight], [grad])[0] is dummy
    assert weight.asked[0] is grad


def test_a_group_hands_over_its_gradients_once_as_a_list() -> None:
    answer = [torch.zeros(2, 2), None]
    weights, grads = [shard(answer), shard()], [torch.ones(4, 2), torch.ones(4, 2)]
    assert finalize_weight_grads(weights, grads) == answer
    assert len(weights[0].asked) == 1
    assert weights[0].asked[0] == grads
    assert weights[1].asked == []


@pytest.mark.parametrize("ask", [*MATERIALIZE, lambda w: finalize_weight_grads(w, [None])])
@pytest.mark.parametrize("weight", [None, 3, object()], ids=["none", "int", "object"])
def test_what_is_no_tensor_is_no_weight(ask: Any, weight: Any) -> None:
    with pytest.raises(DtypeError, match=r"must be a torch\.Tensor"):
        ask(weight)


@pytest.mark.parametrize("weights", [torch.ones(2), shard(), [shard(), shard()]])
@pytest.mark.parametrize("count", [0, 3])
def test_as_many_gradients_as_weights_are_wanted(weights: Any, count: int) -> None:
    with pytest.raises(ShapeError, match="one gradient"):
        finalize_weight_grads(weights, [torch.ones(2)] * count)


def test_a_weight_without_gradient_may_be_given_none() -> None:
    assert finalize_weight_grads(torch.ones(2), None) == [None]


@pytest.mark.parametrize("count", [1, 4])
def test_a_provider_that_keeps_the_gradient_answers_none_for_all(count: int) -> None:
    weights = [shard() for _ in range(count)]
    assert finalize_weight_grads(weights, [torch.ones(4, 2)] * count) == [None] * count


@pytest.mark.parametrize("marked", [False, True], ids=["plain", "distributed"])
def test_nobody_is_asked_for_the_whole_protocol_on_the_way(
    marked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = GroupedLinear(2, 3, 4, bias=False)
    if marked:
        whole = layer.weight.detach().clone()
        layer.weight = Shard(whole).tell([whole])
    asked: list[type] = []
    ask: Any = type(DistributedWeight).__instancecheck__

    def listen(cls: type, instance: object) -> bool:
        asked.append(cls)
        return ask(cls, instance)

    monkeypatch.setattr(type(DistributedWeight), "__instancecheck__", listen)
    assert isinstance(shard(), DistributedWeight)
    assert asked == [DistributedWeight]
    layer(torch.ones(5, 3, requires_grad=True), [2, 3]).sum().backward()
    assert asked.count(DistributedWeight) == 1
