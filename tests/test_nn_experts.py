"""Experts load from one 3-D tensor and from one tensor each, and are saved in both ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backstash.nn import GroupedLinear, GroupedMLP
from backstash.recipes import quantized_model_init
from backstash.tensors import QuantizedTensor
from nn_cases import FFN, G, H, N

BUILDS = pytest.mark.parametrize(
    "build",
    [
        lambda: GroupedLinear(G, H, N),
        lambda: GroupedLinear(G, H, N, bias=False),
        lambda: GroupedMLP(G, H, FFN, bias=True),
    ],
    ids=["GroupedLinear", "GroupedLinear without bias", "GroupedMLP"],
)


def assert_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@BUILDS
def test_the_state_dict_has_one_tensor_a_parameter_and_loads_back(build: Any) -> None:
    source, target = build(), build()
    assert set(source.state_dict()) == {name for name, _ in source.named_parameters()}
    assert target.load_state_dict(source.state_dict(), strict=True)
    assert_same(source, target)


@BUILDS
@pytest.mark.parametrize("prefix", ["", "layers.0.experts."])
def test_keys_for_each_expert_load_strictly_under_any_prefix(build: Any, prefix: str) -> None:
    source, target = build(), build()
    outer = torch.nn.Module()
    module: torch.nn.Module = outer
    for part in prefix.split(".")[:-2]:
        module.add_module(part, torch.nn.Module())
        module = getattr(module, part)
    if prefix:
        module.add_module("experts", target)
    state = {prefix + key: value for key, value in source.expert_state_dict().items()}
    given = dict(state)
    (outer if prefix else target).load_state_dict(state, strict=True)
    assert_same(source, target)
    assert state.keys() == given.keys()


@BUILDS
def test_the_state_for_each_expert_is_views_of_the_parameters(build: Any) -> None:
    module = build()
    state = module.expert_state_dict()
    assert len(state) == G * len(list(module.parameters()))
    for name, parameter in module.named_parameters():
        for g in range(G):
            assert torch.equal(state[f"{name}{g}"], parameter[g])
            assert state[f"{name}{g}"].data_ptr() == parameter[g].data_ptr()


@BUILDS
def test_weights_kept_in_low_precision_go_out_and_in_as_values_for_each_expert(build: Any) -> None:
    with quantized_model_init("mxfp8"):
        source, target = build(), build()
    state = source.expert_state_dict()
    assert not any(isinstance(value, QuantizedTensor) for value in state.values())
    target.load_state_dict(state, strict=True)
    again = target.expert_state_dict()
    assert all(torch.equal(again[key], value) for key, value in state.items())


def test_linears_load_as_the_groups() -> None:
    linears = [torch.nn.Linear(H, N) for _ in range(G)]
    module = GroupedLinear(G, H, N)
    state = {f"{k}{g}": v for g, one in enumerate(linears) for k, v in one.state_dict().items()}
    module.load_state_dict(state, strict=True)
    x = torch.randn(G, H)
    y = module(x, [1] * G)
    for g, linear in enumerate(linears):
        torch.testing.assert_close(y[g], linear(x[g]))


def test_experts_load_into_a_module_without_memory() -> None:
    source, target = GroupedLinear(G, H, N), GroupedLinear(G, H, N, device="meta")
    target.load_state_dict(source.expert_state_dict(), strict=True, assign=True)
    assert_same(source, target)


def test_an_expert_that_is_missing_is_reported() -> None:
    state = GroupedLinear(G, H, N).expert_state_dict()
    del state["weight2"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"weight"') as caught:
        GroupedLinear(G, H, N).load_state_dict(state)
    assert "weight0" in str(caught.value)


def test_an_expert_of_another_shape_is_reported() -> None:
    state = GroupedLinear(G, H, N).expert_state_dict()
    state["weight2"] = torch.zeros(1, 1)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"weight0"'):
        GroupedLinear(G, H, N).load_state_dict(state)


def test_each_expert_is_drawn_within_the_bound_of_a_linear() -> None:
    module = GroupedMLP(G, H, FFN, bias=True)
    for parameter, features in ((module.fc1_weight, H), (module.fc2_weight, FFN)):
        assert parameter.abs().max() <= features**-0.5
        assert parameter.std() > 0.4 * features**-0.5
        assert not torch.equal(parameter[0], parameter[1])
