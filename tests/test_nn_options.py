"""What a layer may be made with: everything else is refused, by the name of the option."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import backstash as bs
from backstash.nn.options import check_numbers, placement

SIZES: dict[str, tuple[Any, dict[str, int]]] = {
    "Linear": (bs.Linear, {"in_features": 4, "out_features": 4}),
    "LayerNormLinear": (bs.LayerNormLinear, {"in_features": 4, "out_features": 4}),
    "LayerNormMLP": (bs.LayerNormMLP, {"hidden_size": 4, "ffn_hidden_size": 4}),
    "GroupedLinear": (
        bs.GroupedLinear,
        {"num_gemms": 2, "in_features": 4, "out_features": 4},
    ),
    "GroupedMLP": (bs.GroupedMLP, {"num_gemms": 2, "hidden_size": 4, "ffn_hidden_size": 4}),
    "Router": (bs.Router, {"hidden_size": 4, "num_experts": 2, "top_k": 1}),
    "MoE": (
        bs.MoE,
        {"hidden_size": 4, "ffn_hidden_size": 4, "num_experts": 2, "top_k": 1},
    ),
}
each_layer = pytest.mark.parametrize(("make", "sizes"), SIZES.values(), ids=SIZES)
NO_SIZES = [-1, 2.0, "4", None, True, float("nan"), torch.tensor(4)]
FLAGS = {
    "bias",
    "save_original_input",
    "delay_wgrad_compute",
    "fuse_wgrad_accumulation",
    "return_layernorm_output",
}


def options_of(make: Any) -> set[str]:
    return set(make.__init__.__annotations__)


@each_layer
@pytest.mark.parametrize("wrong", NO_SIZES, ids=repr)
def test_a_size_is_a_whole_number(make: Any, sizes: dict[str, int], wrong: Any) -> None:
    for name in sizes:
        with pytest.raises(bs.ConfigError, match=f"{name} must be a whole number of at least"):
            make(**(sizes | {name: wrong}))


@each_layer
@pytest.mark.parametrize("wrong", [None, 1, "no"], ids=repr)
def test_a_switch_is_on_or_off(make: Any, sizes: dict[str, int], wrong: Any) -> None:
    for name in FLAGS & options_of(make):
        with pytest.raises(bs.ConfigError, match=f"{name} must be True or False, got {wrong!r}"):
            make(**sizes, **{name: wrong})


@each_layer
@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, "float32"], ids=str)
def test_parameters_are_of_a_floating_dtype(make: Any, sizes: dict[str, int], dtype: Any) -> None:
    with pytest.raises(bs.DtypeError, match="inside quantized_model_init"):
        make(**sizes, dtype=dtype)


@each_layer
@pytest.mark.parametrize("device", ["nowhere", 2.5], ids=repr)
def test_parameters_are_on_a_device_that_there_is(
    make: Any, sizes: dict[str, int], device: Any
) -> None:
    with pytest.raises(bs.DeviceError, match="device must be one that torch knows"):
        make(**sizes, device=device)


def test_a_name_is_a_text() -> None:
    for make, sizes in SIZES.values():
        if "name" in options_of(make):
            with pytest.raises(bs.ConfigError, match="name must be a text"):
                make(**sizes, name=3)
    with pytest.raises(bs.ConfigError, match=r"needs a torch\.nn\.Module, got int"):
        bs.name_modules(3)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("make", [bs.LayerNormLinear, bs.LayerNormMLP])
@pytest.mark.parametrize("eps", [-1.0, float("nan"), float("inf"), "small", None, True], ids=repr)
def test_epsilon_is_a_finite_number(make: Any, eps: Any) -> None:
    with pytest.raises(bs.ConfigError, match="eps must be a finite number of at least 0"):
        make(4, 4, eps)


def test_a_number_above_a_bound_is_not_the_bound() -> None:
    check_numbers(above=0, remedy="pass 1", scale=1)
    with pytest.raises(bs.ConfigError, match="must be a finite number above 0, got 0; pass 1"):
        check_numbers(above=0, remedy="pass 1", scale=0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_groups": 1.0},
        {"top_groups": True},
        {"normalize": "yes"},
        {"group": 3},
        {"weight_scale": None},
        {"z_loss_weight": "x"},
        {"aux_loss_weight": True},
    ],
    ids=repr,
)
def test_a_router_is_configured_by_values_that_mean_something(wrong: dict[str, Any]) -> None:
    with pytest.raises(bs.ConfigError, match=f"{next(iter(wrong))} must be"):
        bs.RouterConfig(**wrong)


@pytest.mark.parametrize("make", [bs.Router, bs.MoE])
def test_a_router_takes_no_other_configuration(make: Any) -> None:
    sizes: dict[str, Any] = dict(SIZES[make.__name__][1])
    sizes["config" if make is bs.Router else "router"] = {"score": "sigmoid"}
    with pytest.raises(bs.ConfigError, match="RouterConfig"):
        make(**sizes)


def test_a_row_map_is_made_of_tensors() -> None:
    with pytest.raises(bs.ShapeError, match="source_R must be a tensor of 1"):
        bs.RowMap([0, 1], torch.zeros(2, 1))  # pyright: ignore[reportArgumentType]


def test_there_may_be_no_features_at_all() -> None:
    assert torch.equal(bs.Linear(0, 2, bias=False)(torch.ones(3, 0)), torch.zeros(3, 2))


def test_a_device_may_be_given_in_every_way_of_torch() -> None:
    for device in (None, "cpu", torch.device("meta")):
        assert placement(device, None)["dtype"] is None
