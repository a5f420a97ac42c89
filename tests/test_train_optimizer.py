"""Masters take the steps that bfloat16 weights cannot, and the rate follows its curve."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from backstash.errors import CheckpointError
from backstash.train.config import OptimizerConfig
from backstash.train.optimizer import Optimizer, learning_rate

CONFIG = OptimizerConfig(learning_rate=1.0, warmup=0.1, final_ratio=0.2)


def test_the_rate_rises_in_a_line_and_falls_to_its_last_value() -> None:
    rates = [learning_rate(step, 100, CONFIG) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == 1.0
    assert rates[54] == pytest.approx(0.6, abs=0.01)
    assert rates[-1] == pytest.approx(0.2)
    assert rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("warmup", [0.0, 0.5, 1.0])
def test_short_runs_have_a_rate_too(steps: int, warmup: float) -> None:
    config = OptimizerConfig(warmup=warmup)
    rates = [learning_rate(step, steps, config) for step in range(steps)]
    assert all(0 < rate <= config.learning_rate for rate in rates)


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8, dtype=dtype), nn.Linear(8, 2, dtype=dtype))


def take_step(module: nn.Module, optimizer: Optimizer, step: int) -> torch.Tensor:
    torch.manual_seed(step)
    x = torch.randn(5, 4, dtype=next(module.parameters()).dtype)
    module(x).square().sum().backward()
    optimizer.collect()
    norm = optimizer.gradient_norm()
    optimizer.step(step, norm)
    return norm


def test_float32_weights_take_the_steps_of_adamw() -> None:
    ours, theirs = model(torch.float32), model(torch.float32)
    config = OptimizerConfig(learning_rate=0.01, warmup=0.0, final_ratio=1.0, clip_norm=1e9)
    optimizer = Optimizer(ours, config, steps=3)
    matrices = [p for p in theirs.parameters() if p.ndim > 1]
    vectors = [p for p in theirs.parameters() if p.ndim < 2]
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.9, 0.95),
    )
    for step in range(3):
        take_step(ours, optimizer, step)
        torch.manual_seed(step)
        theirs(torch.randn(5, 4)).square().sum().backward()
        adam.step()
        adam.zero_grad()
    for got, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(got, wanted)


def test_a_step_too_small_for_bfloat16_adds_up_in_the_master() -> None:
    module = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(module.weight)
    config = OptimizerConfig(learning_rate=1e-3, warmup=0.0, final_ratio=1.0, weight_decay=0.0)
    optimizer = Optimizer(module, config, steps=100)
    for step in range(10):
        module.weight.grad = torch.ones_like(module.weight)
        optimizer.collect()
        optimizer.step(step, optimizer.gradient_norm())
    # One step of 0.001 is less than half a bfloat16 step below one; ten of them are not.
    assert module.weight.item() == pytest.approx(0.99, abs=0.003)


def test_gradients_of_several_passes_add_up_in_float32() -> None:
    module = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    optimizer = Optimizer(module, OptimizerConfig(), steps=1)
    for value in (256.0, 1.0, 1.0):
        module.weight.grad = torch.full_like(module.weight, value)
        optimizer.collect()
    assert module.weight.grad is None
    assert optimizer.gradient_norm().item() == 258.0


def test_large_gradients_are_scaled_to_the_norm() -> None:
    module = model(torch.float32)
    config = OptimizerConfig(clip_norm=0.5)
    optimizer = Optimizer(module, config, steps=1)
    module(torch.full((1, 4), 100.0)).sum().backward()
    norm = optimizer.gradient_norm()
    assert norm > 0.5
    torch.nn.utils.clip_grads_with_norm_(module.parameters(), 0.5, norm)
    assert optimizer.gradient_norm().item() == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_restored_optimizer_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    first = model(dtype)
    optimizer = Optimizer(first, OptimizerConfig(), steps=4)
    take_step(first, optimizer, 0)
    second = model(dtype)
    second.load_state_dict(first.state_dict())
    other = Optimizer(second, OptimizerConfig(), steps=4)
    other.set_state({name: tensor.clone() for name, tensor in optimizer.state().items()})
    for step in (1, 2):
        take_step(first, optimizer, step)
        take_step(second, other, step)
    for name, tensor in optimizer.state().items():
        assert torch.equal(other.state()[name], tensor), name
    for got, wanted in zip(second.parameters(), first.parameters(), strict=True):
        assert torch.equal(got, wanted)


def test_a_state_of_other_weights_is_refused() -> None:
    optimizer = Optimizer(model(torch.float32), OptimizerConfig(), steps=1)
    with pytest.raises(CheckpointError, match=r"differ in .* tensors"):
        optimizer.set_state({"exp_avg.other": torch.zeros(1)})


def test_dropped_gradients_are_gone() -> None:
    module = model(torch.bfloat16)
    optimizer = Optimizer(module, OptimizerConfig(), steps=1)
    module(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.collect()
    optimizer.drop_gradients()
    assert all(p.grad is None for p in module.parameters())
    assert optimizer.gradient_norm().item() == 0.0
