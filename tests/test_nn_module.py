"""The base of the layers: recipes take effect call by call, states come back bit for bit."""

from __future__ import annotations

import copy
import functools
import io
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import backstash as bs
from backstash.nn.module import QuantizedModule, name_modules, scaling_state
from backstash.recipes import DelayedScaling
from backstash.tensors import QuantizedTensor
from saving_cases import grad_of
from scaling_cases import RECIPE, L, batches, model, noted, state, step

LOW = [name for name in bs.recipe_names() if name != "high_precision"]
#: Formats that a weight can be stored in; a learnt scale is replaced by a current one.
STORED = {"float8_current": "float8_current", "float8_delayed": "float8_current", "mxfp8": "mxfp8"}
each_stored = pytest.mark.parametrize(("name", "stored"), STORED.items(), ids=STORED)


def train(net: nn.Module, steps: int, recipe: Any = RECIPE, start: int = 0) -> list[Tensor]:
    losses = []
    for index, x in zip(range(start + steps), batches(), strict=False):
        if index < start:
            continue
        net.zero_grad()
        with bs.autocast(recipe=recipe):
            loss = net(x).square().sum()
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.sub_(0.01 * grad_of(parameter))
        losses.append(loss.detach())
    return losses


def same_parameters(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("recipe", bs.recipe_names())
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_state_dicts_of_plain_linears_load_both_ways(bias: bool, recipe: str) -> None:
    ours, plain = bs.Linear(5, 3, bias=bias), nn.Linear(5, 3, bias=bias)
    ours.load_state_dict(plain.state_dict(), strict=True)
    x = torch.randn(4, 5)
    assert torch.equal(ours(x), plain(x))
    with bs.autocast(recipe=recipe):
        ours(x).sum().backward()
    saved = ours.state_dict()
    learnt = [key for key in saved if key.startswith("delayed_scaling.")]
    assert bool(learnt) == (recipe == "float8_delayed")
    plain = nn.Linear(5, 3, bias=bias)
    plain.load_state_dict({key: saved[key] for key in saved if key not in learnt}, strict=True)
    assert torch.equal(ours(x), plain(x))
    ours.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(ours(x), plain(x))


@pytest.mark.parametrize("through", ["memory", "file", "safetensors"])
@pytest.mark.parametrize("waiting", [False, True], ids=["settled", "call_without_backward"])
def test_training_goes_on_bit_for_bit_from_a_saved_state(through: str, waiting: bool) -> None:
    net = model()
    train(net, 3)
    if waiting:  # its graph is alive, and nobody will run it backward
        with bs.autocast(recipe=RECIPE):
            x = torch.zeros(3, 6, requires_grad=True)
            kept = [net(x), net(x)]
        kept[0].sum().backward()
    saved = copy.deepcopy(net.state_dict())
    if through == "file":
        torch.save(saved, file := io.BytesIO())
        file.seek(0)
        saved = torch.load(file, weights_only=True)
    if through == "safetensors":
        saved = safetensors.torch.load(safetensors.torch.save(saved))
    again = model()
    again.load_state_dict(saved, strict=True)
    losses = train(net, 4, start=3)
    assert torch.equal(torch.stack(losses), torch.stack(train(again, 4, start=3)))
    assert state(net) == state(again)
    assert same_parameters(net, again)


def test_a_loaded_state_that_was_not_used_yet_is_saved_again() -> None:
    net, again = model(), model()
    train(net, 2)
    saved = net.state_dict()
    again.load_state_dict(saved)
    assert again.state_dict().keys() == saved.keys()
    assert all(torch.equal(again.state_dict()[key], saved[key]) for key in saved)


def test_saving_a_state_changes_none() -> None:
    net, reference = model(), model()
    for _ in range(3):
        train(net, 2)
        net.state_dict()
        train(reference, 2)
    assert state(net) == state(reference)


def test_a_saved_state_does_not_move_on_with_training() -> None:
    net = model()
    train(net, 1)
    saved = {k: v for k, v in net.state_dict().items() if "delayed_scaling" in k}
    copies = copy.deepcopy(saved)
    train(net, 2)
    assert all(torch.equal(saved[key], copies[key]) for key in saved)


def test_loading_replaces_what_was_learnt() -> None:
    net, other = model(), model()
    train(net, 2)
    train(other, 3, start=5)
    other.load_state_dict(net.state_dict())
    assert torch.equal(torch.stack(train(net, 2)), torch.stack(train(other, 2)))
    assert state(net) == state(other)


def test_loading_in_the_middle_of_a_step_forgets_it() -> None:
    net = model()
    train(net, 2)
    saved = copy.deepcopy(net.state_dict())
    with bs.autocast(recipe=RECIPE):
        y = net(100 * next(batches()))
        net.load_state_dict(saved)
    with pytest.raises(bs.ModifiedError):
        y.sum().backward()
    reference = model()
    reference.load_state_dict(saved)
    assert torch.equal(torch.stack(train(net, 2)), torch.stack(train(reference, 2)))
    assert state(net) == state(reference)


def test_a_state_of_a_longer_history_is_refused_each_time() -> None:
    net, other = model(), model()
    train(net, 1)
    other.load_state_dict(net.state_dict())
    for _ in range(2):
        with pytest.raises(bs.CheckpointError, match="recipe options"):
            train(other, 1, bs.recipe("float8_delayed", history=L + 1))


@pytest.mark.parametrize("names", [("mxfp8", "float8_current"), ("high_precision", "mxfp8")])
def test_another_recipe_takes_effect_at_the_next_call(names: tuple[str, str]) -> None:
    net, x = model(1), next(batches())
    for name in (*names, *names):
        with bs.autocast(recipe=name):
            y = net(x)
        fresh = model(1)
        with bs.autocast(recipe=name):
            assert torch.equal(y, fresh(x))


def test_another_option_takes_effect_at_the_next_call() -> None:
    net = model(1)
    train(net, 2)
    before = state(net)["0.gradient"]
    step(net, x := next(batches()))
    with bs.autocast(recipe=bs.recipe("float8_delayed", history=L, margin=2)):
        net(x)
    scale, *history = state(net)["0.input"]
    assert scale == (torch.tensor(448 / 4) / max(history)).item()
    assert noted(net, "0.gradient")[:2] == [amax for amax in before[1:] if amax]


def test_delayed_scaling_may_pause() -> None:
    net = model(1)
    train(net, 2)
    before = state(net)
    train(net, 2, "mxfp8")
    train(net, 2, "high_precision")
    assert state(net) == before


def test_a_copy_learns_on_its_own() -> None:
    net = model()
    train(net, 2)
    twin = copy.deepcopy(net)
    assert state(twin) == state(net)
    train(twin, 1)
    assert state(twin) != state(net)


def test_a_copy_in_the_middle_of_a_step_trains_on() -> None:
    net = model()
    with bs.autocast(recipe=RECIPE):
        y = net(next(batches()))
    twin = copy.deepcopy(net)
    y.sum().backward()
    assert same_parameters(net, twin)
    assert all(torch.isfinite(loss) for loss in train(twin, 2))


def test_modules_pickle_with_what_they_learnt() -> None:
    net = model()
    train(net, 2)
    torch.save(net, file := io.BytesIO())
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    assert state(twin) == state(net)
    assert torch.equal(torch.stack(train(net, 2)), torch.stack(train(twin, 2)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_moving_to_another_dtype_keeps_what_was_learnt(dtype: torch.dtype) -> None:
    net = model(1)
    train(net, 2)
    before = state(net)
    net.to(dtype)
    assert state(net) == before
    with bs.autocast(recipe=RECIPE):
        y = net(next(batches()).to(dtype))
    assert y.dtype == dtype
    assert all(s.scale_G.dtype == torch.float32 for s in scaling_state(net).values())


def test_scales_move_with_the_parameters_and_not_to_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, moved = bs.Linear(32, 32), []
    with bs.autocast(recipe="float8_delayed"):
        layer(torch.ones(4, 32)).sum().backward()
    count = len(scaling_state(layer))
    assert count == 3
    monkeypatch.setattr(DelayedScaling, "to", lambda self, device: moved.append(device.type))
    assert layer.to("cpu") is layer
    assert moved == ["cpu"] * count
    layer.to("meta")
    assert moved == ["cpu"] * count


def test_names_reach_the_recipe() -> None:
    net = name_modules(nn.ModuleDict({"body": model(2), "head": bs.Linear(6, 6)}))
    assert [m.name for m in net.modules() if isinstance(m, QuantizedModule)] == [
        "body.0",
        "body.1",
        "head",
    ]
    x = torch.randn(3, 6)
    recipe = bs.recipe("mxfp8", keep_high_precision=("head", "*.1"))
    with bs.autocast(recipe=recipe):
        outputs = [net["head"](x), net["body"][1](x), net["body"][0](x)]  # pyright: ignore
    plain = [net["head"](x), net["body"][1](x), net["body"][0](x)]  # pyright: ignore
    assert [torch.equal(a, b) for a, b in zip(outputs, plain, strict=True)] == [True, True, False]


MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: bs.Linear(33, 6),
    "LayerNormLinear": lambda: bs.LayerNormLinear(33, 6),
    "LayerNormMLP": lambda: bs.LayerNormMLP(33, 12),
    "GroupedLinear": lambda: bs.GroupedLinear(3, 33, 6),
    "GroupedMLP": lambda: bs.GroupedMLP(3, 33, 12, bias=True),
}
each_module = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)


def call(module: nn.Module, x: Tensor) -> Tensor:
    return module(x, [4, 0, 3]) if "Grouped" in type(module).__name__ else module(x)


def quantized_names(module: nn.Module) -> set[str]:
    return {n for n, p in module.named_parameters() if isinstance(p, QuantizedTensor)}


@each_module
@each_stored
def test_only_weights_of_matmuls_are_created_in_low_precision(
    make: Callable[[], nn.Module], name: str, stored: str
) -> None:
    with bs.quantized_model_init(name):
        module = make()
    weights = {n for n, _ in module.named_parameters() if n.endswith("weight")}
    assert quantized_names(module) == {n for n in weights if "layer_norm" not in n}
    for parameter_name, parameter in module.named_parameters():
        assert isinstance(parameter, nn.Parameter)
        if parameter_name in quantized_names(module):
            assert isinstance(parameter, QuantizedTensor)
            assert parameter.format.name == stored
            assert parameter.usage is bs.Usage.BOTH


@pytest.mark.parametrize("make", [bs.LayerNormMLP, functools.partial(bs.GroupedMLP, 2)])
def test_a_weight_that_a_recipe_names_is_created_as_its_matmul_reads_it(
    make: Callable[..., nn.Module],
) -> None:
    with bs.quantized_model_init(bs.recipe("mxfp8", keep_high_precision=("block.fc1",))):
        module = make(32, 64, name="block")
    assert quantized_names(module) == {"fc2_weight"}


@each_module
@each_stored
def test_a_quantized_weight_is_the_plain_one_quantized_once(
    make: Callable[[], nn.Module], name: str, stored: str
) -> None:
    torch.manual_seed(3)
    plain = make()
    torch.manual_seed(3)
    with bs.quantized_model_init(name):
        created = make()
    with bs.quantized_model_init(name):
        loaded = make()
    loaded.load_state_dict(plain.state_dict(), strict=True)
    format = bs.recipe(stored).weight
    for key in quantized_names(created):
        weight = plain.get_parameter(key).detach()
        if weight.ndim == 3:
            groups = [format.quantize(w, usage=bs.Usage.BOTH) for w in weight]
            wanted = [torch.stack([q.dequantize(u) for q in groups]) for u in bs.Usage]
        else:
            wanted = [format.quantize(weight, usage=u).dequantize() for u in bs.Usage]
        for module in (created, loaded):
            parameter = module.get_parameter(key)
            assert isinstance(parameter, QuantizedTensor)
            for usage, values in zip(bs.Usage, wanted, strict=True):
                assert torch.equal(parameter.dequantize(usage), values)


@each_module
@each_stored
@pytest.mark.parametrize("recipe", bs.recipe_names())
def test_a_module_with_quantized_weights_trains_under_every_recipe(
    make: Callable[[], nn.Module], name: str, stored: str, recipe: str
) -> None:
    with bs.quantized_model_init(name):
        module = make()
    x = torch.randn(7, 33, requires_grad=True)
    with bs.autocast(enabled=recipe != "high_precision", recipe=recipe):
        y = call(module, x)
    y.square().sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
    assert all(type(p.grad) is Tensor for p in module.parameters())


@each_module
def test_a_module_with_quantized_weights_saves_and_loads_itself(
    make: Callable[[], nn.Module],
) -> None:
    with bs.quantized_model_init("mxfp8"):
        module, twin = make(), make()
    torch.save(module.state_dict(), file := io.BytesIO())
    file.seek(0)
    twin.load_state_dict(torch.load(file, weights_only=True), strict=True)
    deep = copy.deepcopy(module)
    x = torch.randn(7, 33)
    assert torch.equal(call(twin, x), call(module, x))
    assert torch.equal(call(deep, x), call(module, x))
    module.to(torch.bfloat16)
    assert quantized_names(module) == quantized_names(twin)
    assert call(module, x.bfloat16()).dtype == torch.bfloat16


def test_parameters_can_be_made_on_no_device() -> None:
    with bs.quantized_model_init("mxfp8"):
        module = bs.Linear(33, 6, device="meta")
    assert module.weight.device.type == "meta"


def test_mistakes_are_errors_without_assertions_too() -> None:
    program = """
import torch, backstash as bs
for wrong in (lambda: bs.recipe("x"), lambda: bs.autocast(recipe=3), lambda: bs.saving(3),
              lambda: bs.prepare_for_saving(3), lambda: bs.keep_identity(3)):
    try:
        wrong()
    except bs.BackstashError:
        continue
    raise SystemExit("not refused")
"""
    done = subprocess.run([sys.executable, "-O", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
