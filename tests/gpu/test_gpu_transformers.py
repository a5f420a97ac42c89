"""A transformers model on a GPU, whose experts' buffers are marked as the example marks them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import backstash as bs
from host_reads import no_host_reads
from stash_cases import assert_nothing_is_held

pytestmark = pytest.mark.gpu

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny_config(transformers: Any) -> Any:
    return transformers.Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        attn_implementation="eager",
    )


def tiny_model(transformers: Any, device: str) -> Any:
    """Two layers with random weights, whose experts have room for twice their rows."""
    torch.manual_seed(0)
    config = tiny_config(transformers)
    model = transformers.Qwen3MoeForCausalLM(config).to(device, torch.bfloat16)
    experts = example("marked_experts").CapacityExperts
    for layer in model.model.layers:
        theirs = layer.mlp.experts
        layer.mlp.experts = experts(theirs.gate_up_proj, theirs.down_proj, room=2.0)
    return model


def gradients(model: Any, ids: Tensor, *handlers: Any) -> list[Tensor]:
    with bs.saving(*handlers):
        loss = model(input_ids=ids, labels=ids).loss
    return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))


@pytest.mark.parametrize("policy", bs.Policy, ids=lambda policy: policy.value)
def test_gradients_of_a_transformers_model_are_bit_equal_and_its_rows_are_kept(
    policy: bs.Policy,
) -> None:
    transformers = pytest.importorskip("transformers")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = tiny_model(transformers, device)
    ids = torch.randint(0, 256, (4, 128), device=device)
    stash = bs.Stash(
        bs.PagePool(32 << 20, device=device, page_bytes=4096), policy=policy, tail=bs.Tail.ZEROS
    )
    for _ in range(2):
        plain = gradients(model, ids)
        ours = gradients(model, ids, stash)
        for one, other in zip(plain, ours, strict=True):
            assert torch.equal(one, other)
    # Of every buffer half of the rows are there: 1024 of 64, 192, 96 and 96 bfloat16 a layer.
    rows = ids.numel() * 2
    assert stash.stats().bytes_stashed == 2 * 2 * rows * (64 + 192 + 96 + 96) * 2
    assert_nothing_is_held(stash)


def test_experts_of_a_transformers_model_run_by_ours_ask_the_device_nothing() -> None:
    transformers = pytest.importorskip("transformers")
    run_experts = example("transformers_experts").run_experts
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(tiny_config(transformers))
    theirs = model.model.layers[0].mlp.experts.cuda().bfloat16()
    x = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight_TK, expert_TK = torch.rand(300, 8, device="cuda").softmax(1).topk(2)

    def step(run: Any) -> list[Tensor]:
        y = run(x, expert_TK, weight_TK.bfloat16())
        return [y, *torch.autograd.grad(y.float().square().sum(), [x, *theirs.parameters()])]

    def ours(*given: Tensor) -> Tensor:
        return run_experts(theirs, *given)

    step(ours)  # compiles
    with no_host_reads():
        found = step(ours)
    for one, other in zip(found, step(theirs), strict=True):
        # Both round to bfloat16 a handful of times.
        scale = other.float().abs().max()
        torch.testing.assert_close(one / scale, other / scale, rtol=2**-6, atol=2**-6)
