"""transformers models whose experts are run by ours, as the example does it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import backstash as bs

transformers = pytest.importorskip("transformers")
EXAMPLE = Path(__file__).parents[1] / "examples" / "transformers_experts.py"
SIZES = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
INNER = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
GROUPS = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
CONFIGS = {
    "Qwen3Moe": {"num_experts": 8, "num_key_value_heads": 2, "head_dim": 16, **INNER},
    "Mixtral": {"num_local_experts": 8, "num_key_value_heads": 2, "intermediate_size": 48},
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 48},
    "DeepseekV3": {"intermediate_size": 96, "num_key_value_heads": 4, **INNER, **LATENT, **GROUPS},
}


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("transformers_experts", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def registered(example: ModuleType) -> None:
    example.moe.ALL_EXPERTS_FUNCTIONS.register("backstash", example.run_experts)


def model_of(name: str, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **CONFIGS[name])
    config._attn_implementation = "eager"
    return getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)


def step(model: Any, experts: str) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Loss, bytes kept, and gradients by name, with ``experts`` to run the experts."""
    model.set_experts_implementation(experts)
    model.zero_grad()
    ids = torch.randint(0, 128, (2, 64), generator=torch.Generator().manual_seed(1))
    meter = bs.Meter()
    with bs.saving(meter):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), meter.bytes, grads


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_model_has_the_same_loss_and_gradients_with_our_experts_and_keeps_less(name: str) -> None:
    model = model_of(name)
    loss, plain_bytes, plain = step(model, "eager")
    our_loss, our_bytes, ours = step(model, "backstash")
    assert our_bytes < plain_bytes
    torch.testing.assert_close(our_loss, loss)
    assert ours.keys() == plain.keys()
    for key in plain:
        torch.testing.assert_close(ours[key], plain[key], msg=key)


@pytest.mark.parametrize("reentrant", [False, True])
def test_their_gradient_checkpointing_changes_no_bit(reentrant: bool) -> None:
    model = model_of("Qwen3Moe", torch.float32).train()
    with bs.autocast(recipe="mxfp8"):
        _, plain_bytes, plain = step(model, "backstash")
    # The second is what older versions call it.
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next(getattr(model, name) for name in names if hasattr(model, name))
    enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with bs.autocast(recipe="mxfp8"):
        _, less, again = step(model, "backstash")
    assert less < plain_bytes
    assert all(torch.equal(again[key], plain[key]) for key in plain)


def test_what_is_written_is_read_with_either_experts(tmp_path: Path) -> None:
    model = model_of("Qwen3Moe", torch.float32)
    model.set_experts_implementation("backstash")
    model.save_pretrained(tmp_path)
    again = transformers.Qwen3MoeForCausalLM.from_pretrained(
        tmp_path, experts_implementation="backstash", attn_implementation="eager"
    )
    state = again.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    ids = torch.randint(0, 128, (1, 16))
    with torch.no_grad():
        expected = model.eval()(ids).logits
        assert torch.equal(again.eval()(ids).logits, expected)
        again.set_experts_implementation("eager")
        torch.testing.assert_close(again(ids).logits, expected)


def test_experts_that_multiply_otherwise_are_refused() -> None:
    config = transformers.GptOssConfig(
        **SIZES, num_key_value_heads=2, head_dim=16, num_local_experts=4, intermediate_size=48
    )
    model = transformers.GptOssForCausalLM(config)
    model.set_experts_implementation("backstash")
    with pytest.raises(NotImplementedError, match="GptOssExperts is no gated block"):
        model(torch.randint(0, 128, (1, 8)))
