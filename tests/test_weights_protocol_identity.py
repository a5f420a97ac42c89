"""Backward asks the very object that forward asked, in whatever way saved tensors travel.

The product of all layers, all ways, all recipes, and all places where gradients go.  And the
same with the mechanism taken out, to see that this is what these tests are about.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backstash
from backstash import weights
from backstash.errors import ModifiedError
from backstash.moe import MoE
from backstash.recipes import autocast
from backstash.saving import records, save_for_backward, saved_values, slots
from backstash.weights import (
    finalize_weight_grads,
    materialize_weight_for_backward,
    materialize_weight_for_forward,
)
from nn_cases import BACKWARD_SCALE, CASES, FORWARD_SCALE, RECIPES, WAYS, Case, H, Shard


def _moe(**options: Any) -> MoE:
    return MoE(H, 6, 4, 2, shared_ffn_hidden_size=5)


def _nothing() -> Any:
    return (), {}


class _Group(torch.autograd.Function):
    """x times each weight of a group, which its leader gives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        save_for_backward(ctx, x, *weights)
        return torch.cat([x @ w.t() for w in materialize_weight_for_forward(list(weights))], 1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, *weights = saved_values(ctx)
        full = materialize_weight_for_backward(weights)
        pieces = dy.split([len(w) for w in full], 1)
        dx = sum(d @ w for d, w in zip(pieces, full, strict=True))
        grads = finalize_weight_grads(weights, [d.t() @ x for d in pieces])
        return dx, *grads


class Leader(Shard):
    """The first of four, which answers for all."""

    def lead(self, group: list[Shard]) -> Leader:
        self.listen()
        self.group = group
        return self

    def materialize_group_for_forward(self) -> Any:
        return [super().materialize_group_for_forward()] + [
            Shard.materialize_group_for_forward(w) for w in self.group
        ]

    def materialize_group_for_backward(self) -> Any:
        self.asked.append("backward")
        return [w.detach() * BACKWARD_SCALE for w in (self, *self.group)]

    def finalize_group_grads(self, wgrads: Any) -> Any:
        self.asked.append("finalize")
        return wgrads


class GroupOfFour(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(3 + g, H) for g in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return _Group.apply(x, *self.weights)


ALL = [
    *CASES,
    dataclasses.replace(CASES[0], name="MoE", build=_moe),
    dataclasses.replace(CASES[0], name="group of four", build=lambda **_: GroupOfFour()),
]
WITHOUT_OPTIONS = ("MoE", "group of four")
DELIVERIES = list(itertools.product((False, True), repeat=2))


def replaced(module: nn.Module) -> list[Shard]:
    """Put a shard that listens in the place of each weight; the group gets a leader."""
    if isinstance(module, GroupOfFour):
        followers = [Shard(w.detach().clone()).listen() for w in module.weights[1:]]
        leader = Leader(module.weights[0].detach().clone()).lead(followers)
        module.weights = nn.ParameterList([leader, *followers])
        return [leader]
    shards = []
    for owner in list(module.modules()):
        for name in getattr(owner, "materialized_parameters", ()):
            if isinstance(weight := getattr(owner, name, None), nn.Parameter):
                shards.append(Shard(weight.detach().clone()).listen())
                setattr(owner, name, shards[-1])
    return shards


def run(case: Case, module: Any, recipe: str, way: str, *, is_delayed: bool) -> list[Tensor]:
    """Output and every gradient of a step, main_grads included."""
    inputs = case.inputs()
    module.zero_grad()
    for p in module.parameters():
        if isinstance(p, Shard):
            p.listen()
    hooks, through = WAYS[way]
    torch.manual_seed(5)
    with autocast(recipe=recipe), hooks():
        y = through(lambda *given: case.call(module, *given), *inputs)
    torch.manual_seed(6)
    y.backward(torch.randn_like(y) / 8)
    if is_delayed:
        module.backward_dw()
    grads = [t.grad for t in (*inputs, *module.parameters())]
    buffers = [p.main_grad for p in module.parameters() if isinstance(p, Shard)]
    return [y.detach(), *(g for g in grads if g is not None), *buffers]


def options_of(case: Case, delayed: bool, fused: bool) -> dict[str, bool]:
    if case.name in WITHOUT_OPTIONS:
        return {}
    return {"delay_wgrad_compute": delayed, "fuse_wgrad_accumulation": fused}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_backward_asks_the_same_object_and_every_bit_is_that_of_no_hook(
    case: Case, way: str
) -> None:
    deliveries = DELIVERIES[:1] if case.name in WITHOUT_OPTIONS else DELIVERIES
    forwards = 2 if "checkpoint" in way else 1
    for recipe, (delayed, fused) in itertools.product(RECIPES, deliveries):
        module = case.make(**options_of(case, delayed, fused))
        shards = replaced(module)
        came = run(case, module, recipe, way, is_delayed=delayed)
        what = f"{recipe}, delayed={delayed}, fused={fused}"
        for shard in shards:
            assert shard.asked.count("forward") == forwards, what
            assert shard.asked.count("backward") == 1, what
            assert shard.asked.count("finalize") == 1, what
            assert shard.asked.count("grad_buffer") == fused, what
        wanted = without_hooks(case.name, recipe, delayed, fused)
        assert len(came) == len(wanted)
        assert all(torch.equal(a, b) for a, b in zip(came, wanted, strict=True)), what


@functools.cache
def without_hooks(name: str, recipe: str, delayed: bool, fused: bool) -> list[Tensor]:
    case = next(case for case in ALL if case.name == name)
    module = case.make(**options_of(case, delayed, fused))
    replaced(module)
    return run(case, module, recipe, "no hook", is_delayed=delayed)


@pytest.mark.parametrize("case", ALL[:-1], ids=lambda case: case.name)
def test_what_nobody_needs_is_not_asked_for(case: Case) -> None:
    module = case.make()
    shards = replaced(module)
    for p in module.parameters():
        p.requires_grad_(False)
    run(case, module, "high_precision", "no hook", is_delayed=False)
    first = shards[0]
    assert "finalize" not in first.asked
    with torch.no_grad():
        case.call(module, *(x.detach() for x in case.inputs()))
    assert first.asked.count("backward") == 1


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_a_shard_changed_between_forward_and_backward_raises(case: Case) -> None:
    module = case.make()
    shards = replaced(module)
    y = case.call(module, *case.inputs())
    with torch.no_grad():
        shards[-1].add_(1)
    with pytest.raises(ModifiedError):
        y.sum().backward()


# --- the mechanism taken out ---------------------------------------------------------------------


def save_as_autograd_does(*values: Any) -> Any:
    """What comes back of a weight is whatever the hooks give."""
    return values, slots.as_given(len(values))


@pytest.mark.parametrize("way", ["identity", "detached copies", "save_on_cpu"])
def test_without_the_reference_backward_takes_the_shard_for_the_whole_weight(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    case = ALL[0]
    assert FORWARD_SCALE != BACKWARD_SCALE
    whole = case.make()
    shards = replaced(whole)
    with_reference = run(case, whole, "high_precision", way, is_delayed=False)
    monkeypatch.setattr(records, "prepare_for_saving", save_as_autograd_does)
    without = run(case, whole, "high_precision", way, is_delayed=False)
    assert shards[0].asked == ["forward"]
    assert torch.equal(without[0], with_reference[0])
    # The input gradient came out of the shard itself: no error, and the wrong numbers.
    assert torch.equal(without[1] * BACKWARD_SCALE, with_reference[1])


def test_the_package_offers_the_protocol_at_the_top() -> None:
    names = ["DistributedWeight", "is_distributed_weight", "finalize_weight_grads"]
    assert all(getattr(backstash, name) is getattr(weights, name) for name in names)
