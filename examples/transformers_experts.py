"""The experts of a transformers model, run by ``GroupedMLP``: same weights, same state dict.

A transformers model looks up by name who runs its experts; here is one more name.  The model
stays theirs: ``from_pretrained``, ``Trainer`` and ``save_pretrained`` notice nothing.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations import moe

import backstash as bs

ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu"}
OTHERWISE = ("has_bias", "is_transposed", "has_post_expert_norm")


@functools.cache
def layer_of(experts: int, hidden: int, inner: int, activation: str) -> bs.GroupedMLP:
    """Make a layer without memory: the weights are the model's."""
    return bs.GroupedMLP(experts, hidden, inner, activation=activation, device="meta")


def run_experts(self: Any, x: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Give each token of ``x`` (T, H) the weighted sum of its experts, whose module is ``self``."""
    is_plain = type(self)._apply_gate is moe._default_apply_gate and self.has_gate
    if not is_plain or any(getattr(self, name, False) for name in OTHERWISE):
        raise NotImplementedError(f"{type(self).__name__} is no gated block without biases")
    experts, hidden, inner = self.down_proj.shape
    layer = layer_of(experts, hidden, inner, ACTIVATIONS[self.config.hidden_act])
    rows, counts_E = bs.RowMap.by_expert(expert_TK, experts)
    weights = {"fc1_weight": self.gate_up_proj, "fc2_weight": self.down_proj}
    given = (x, counts_E, rows.weights(weight_TK))
    return functional_call(layer, weights, given, {"rows": rows, "combined": True})


def main() -> None:
    """Print the loss of one model, and what a step keeps, with their experts and with ours."""
    moe.ALL_EXPERTS_FUNCTIONS.register("backstash", run_experts)
    torch.manual_seed(0)
    sizes: Any = {"vocab_size": 256, "hidden_size": 64, "moe_intermediate_size": 64}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_hidden_layers=2, num_experts=8))
    ids = torch.randint(0, 256, (4, 64))
    for name in ("eager", "grouped_mm", "backstash"):
        model.set_experts_implementation(name)
        meter = bs.Meter()
        with bs.saving(meter):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        print(f"{name:<10} loss {loss.item():.6f}, {meter.bytes:,} bytes kept for backward")


if __name__ == "__main__":
    main()
