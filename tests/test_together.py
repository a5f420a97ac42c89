"""Layers beside the rest of PyTorch: what the guide says works, works."""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn.utils import parametrize, prune
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import backstash as bs


class LowRank(nn.Module):
    """A weight and a product of two small matrices, which are learnt."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.Parameter(torch.randn(weight.shape[0], 2))
        self.down = nn.Parameter(torch.randn(2, weight.shape[1]))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def experts() -> bs.MoE:
    torch.manual_seed(0)
    config = bs.RouterConfig(aux_loss_weight=0.1, z_loss_weight=0.01)
    return bs.MoE(16, 24, 4, 2, router=config, shared_ffn_hidden_size=8)


def gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert found
    return found


@pytest.mark.parametrize("recipe", ["high_precision", "mxfp8"])
def test_a_parametrized_weight_gets_the_gradient_of_what_it_is_computed_from(recipe: str) -> None:
    layer, x = bs.Linear(16, 8), torch.randn(12, 16)
    plain = copy.deepcopy(layer)
    parametrize.register_parametrization(layer, "weight", LowRank(layer.weight))
    # The same by hand: a layer with the sum as its weight.
    low_rank = LowRank(plain.weight)
    with torch.no_grad():
        plain.weight.copy_(low_rank(plain.weight))
    with bs.autocast(recipe=recipe):
        y, expected = layer(x), plain(x)
    assert torch.equal(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    learnt: Any = layer.parametrizations.weight[0]  # pyright: ignore
    assert plain.weight.grad is not None
    assert torch.equal(learnt.up.grad, plain.weight.grad @ learnt.down.T)
    assert torch.equal(learnt.down.grad, learnt.up.T @ plain.weight.grad)


def test_a_pruned_weight_gets_no_gradient_where_it_is_pruned() -> None:
    layer, x = bs.Linear(16, 8), torch.randn(12, 16)
    prune.l1_unstructured(layer, "weight", 0.5)
    layer(x).sum().backward()
    original, mask = layer.weight_orig, layer.weight_mask
    assert torch.equal(layer(x), F.linear(x, original * mask, layer.bias))  # pyright: ignore
    assert torch.equal(original.grad != 0, mask.bool())  # pyright: ignore


def test_losses_of_a_router_are_scaled_with_those_of_microbatches() -> None:
    x = torch.randn(8, 4, 16)
    whole, parts = experts(), experts()
    for model, count in ((whole, 1), (parts, 4)):
        model.loss_scale = 1 / count
        for _ in range(count):
            (model(x).square().mean() / count).backward()
    # A quarter four times is one, to the bit: nothing of it is rounded.
    assert all(map(torch.equal, gradients(parts), gradients(whole)))


def test_under_a_loss_scaler_gradients_are_those_without_one() -> None:
    x, plain, scaled = torch.randn(8, 16), experts(), experts()
    plain(x).square().mean().backward()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(scaled.parameters())
    scaler.scale(torch.zeros(()))  # makes the factor
    scaled.loss_scale = scaler.get_scale()
    loss: Any = scaler.scale(scaled(x).square().mean())
    loss.backward()
    scaler.unscale_(optimizer)
    assert all(map(torch.equal, gradients(scaled), gradients(plain)))


def test_a_compiled_model_trains_as_it_does_without() -> None:
    results = []
    for compiled in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(16, 16), bs.LayerNormMLP(16, 32), nn.GELU(), experts())
        run: Any = torch.compile(model, backend="aot_eager") if compiled else model
        with bs.autocast(recipe="mxfp8"):
            loss = run(torch.ones(6, 16)).square().mean()
        loss.backward()
        results.append([loss, *gradients(model)])
    assert all(map(torch.equal, *results))


def must_save(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("hooks", [contextlib.nullcontext, save_on_cpu], ids=["alone", "offloaded"])
@pytest.mark.parametrize("recipe", ["high_precision", "float8_current", "mxfp8"])
def test_a_selective_checkpoint_changes_no_bit(recipe: str, hooks: Any) -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, must_save)
    model = nn.Sequential(nn.Linear(16, 16), bs.LayerNormMLP(16, 32), nn.GELU(), experts())
    results = []
    for is_checkpointed in (False, True):
        model.zero_grad()
        with bs.autocast(recipe=recipe), hooks():
            x = torch.ones(6, 16)
            y: Any = (
                checkpoint(model, x, use_reentrant=False, context_fn=contexts)
                if is_checkpointed
                else model(x)
            )
        y.square().sum().backward()
        results.append([y, *gradients(model)])
    assert all(map(torch.equal, *results))


def test_an_averaged_model_follows_it() -> None:
    model = experts()
    averaged = AveragedModel(model, multi_avg_fn=None)
    averaged.update_parameters(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(2)
    averaged.update_parameters(model)
    for mean, p in zip(averaged.module.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mean, p - 1)


def test_an_optimizer_may_step_while_backward_runs() -> None:
    together, alone = experts(), experts()
    x = torch.randn(8, 16)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in together.parameters()}

    def step(p: Tensor) -> None:
        optimizers[p].step()  # pyright: ignore
        p.grad = None

    for p in together.parameters():
        p.register_post_accumulate_grad_hook(step)
    together(x).square().mean().backward()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    alone(x).square().mean().backward()
    optimizer.step()
    assert all(map(torch.equal, together.parameters(), alone.parameters()))


def test_hooks_on_modules_and_parameters_are_called_once() -> None:
    layer, seen = bs.LayerNormMLP(16, 32), []
    layer.register_full_backward_pre_hook(lambda *_: seen.append("before"))
    layer.register_full_backward_hook(lambda *_: seen.append("after"))
    layer.fc1_weight.register_hook(lambda grad: seen.append("gradient"))
    layer.fc1_weight.register_post_accumulate_grad_hook(lambda _: seen.append("added"))
    layer(torch.randn(3, 16, requires_grad=True)).sum().backward()
    assert sorted(seen) == ["added", "after", "before", "gradient"]
    assert seen[0] == "before"


def test_an_exported_layer_gives_the_same() -> None:
    layer, x = bs.LayerNormMLP(16, 32), torch.randn(5, 16)
    exported = torch.export.export(layer, (x,))
    assert torch.equal(exported.module()(x), layer(x))
