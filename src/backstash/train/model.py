"""The language model: a decoder whose feed-forward blocks are Mixtures of Experts.

Each layer reads the residual stream twice: attention, then experts.  Everything with a
matmul inside a layer is a module of ours and runs under the recipe in force.  The first and
the last matrix, embedding and head, stay in high precision: they are where rounding costs
the most and saves the least.

What forward keeps for backward, a layer: the residual stream at both normalizations, the
rotated queries and keys, the values and the output of attention, and the experts' input and
pre-activation.

Letters: B sequences, S positions, T = B * S tokens, H width, L layers, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backstash.moe import Local, MoE, RouterConfig
from backstash.nn import LayerNormLinear, Linear
from backstash.nn.module import name_modules
from backstash.recipes import autocast
from backstash.train.attention import attend, rotary_table
from backstash.train.config import ModelConfig, Recompute
from backstash.train.norm import RMSNorm


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Loss of a batch in nats a token, and the rows that each expert of each layer got."""

    total: Tensor
    counts_LE: Tensor


class Decoder(nn.Module):
    """A decoder-only language model of Mixture-of-Experts layers.

    Args:
        config: sizes.
        dtype: of the weights and activations; the routers' scores are float32 in any case.
        recompute: whether layers keep only their input and run again in backward; may be
            changed at any time.
        save_original_input: let the matmul after attention share its input with attention,
            which keeps it anyway; not for recipes that learn their scales.
        loss_scale: what the loss will be multiplied with before its backward; the routers'
            own losses are multiplied with it too.
        counting: ranks over whose tokens the routers keep the experts equally busy.
    """

    table_2SD: Tensor

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        recompute: Recompute = "none",
        save_original_input: bool = True,
        loss_scale: float = 1.0,
        counting: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.recompute: Recompute = recompute
        self.embedding = nn.Embedding(config.vocabulary, config.hidden, dtype=dtype)
        self.layers = nn.ModuleList(
            Layer(config, counting, dtype=dtype, save_original_input=save_original_input)
            for _ in range(config.layers)
        )
        for moe in self.mixtures():
            moe.loss_scale = loss_scale
        self.head = LayerNormLinear(
            config.hidden,
            config.vocabulary,
            bias=False,
            dtype=dtype,
            normalization="RMSNorm",
        )
        self.register_buffer(
            "table_2SD",
            rotary_table(config.context, config.head_width, config.rotary_base),
            persistent=False,
        )
        initialize(self, config)
        name_modules(self)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return the logits ``(B, S, vocabulary)`` of each next token."""
        x_BSH = self.embedding(tokens_BS)
        table_2SD = self.table_2SD.to(x_BSH.dtype)
        for layer in self.layers:
            x_BSH = self._run(layer, x_BSH, table_2SD)
        with autocast(enabled=False):
            return self.head(x_BSH)

    def loss(self, tokens_BS: Tensor, targets_BS: Tensor) -> Loss:
        """Return how surprised the model is by the targets."""
        total = next_token_loss(self(tokens_BS), targets_BS)
        loads = [moe.last_load for moe in self.mixtures() if moe.last_load is not None]
        return Loss(total=total, counts_LE=torch.stack(loads))

    def mixtures(self) -> list[MoE]:
        """Return the Mixture of Experts of each layer."""
        return [module for module in self.modules() if isinstance(module, MoE)]

    def balance_(self) -> None:
        """Move the routing biases towards an equal load; once a step, when it is known good."""
        for moe in self.mixtures():
            moe.router.update_bias_()

    def forget_counts_(self) -> None:
        """Drop the loads counted since the biases moved, as after a step that failed."""
        for moe in self.mixtures():
            moe.router.forget_counts_()

    def _run(self, layer: nn.Module, x_BSH: Tensor, table_2SD: Tensor) -> Tensor:
        if self.recompute == "none" or not torch.is_grad_enabled():
            return layer(x_BSH, table_2SD)
        is_reentrant = self.recompute == "reentrant"
        return checkpoint(layer, x_BSH, table_2SD, use_reentrant=is_reentrant)


class Layer(nn.Module):
    """Attention and experts, each added to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        counting: dist.ProcessGroup | None = None,
        *,
        dtype: torch.dtype,
        save_original_input: bool,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        features = config.heads * config.head_width
        self.qkv = LayerNormLinear(
            config.hidden,
            features + 2 * config.kv_heads * config.head_width,
            bias=False,
            dtype=dtype,
            normalization="RMSNorm",
        )
        self.projection = Linear(
            features,
            config.hidden,
            bias=False,
            dtype=dtype,
            save_original_input=save_original_input,
        )
        self.norm = RMSNorm(config.hidden, dtype=dtype)
        self.moe = MoE(
            config.hidden,
            config.expert_width,
            config.experts,
            config.top_k,
            shared_ffn_hidden_size=config.shared_width,
            router=RouterConfig(
                bias_update_speed=config.balance_speed,
                aux_loss_weight=config.balance_loss,
                group=counting,
            ),
            dispatcher=Local(capacity_factor=config.capacity_factor),
            dtype=dtype,
        )

    def forward(self, x_BSH: Tensor, table_2SD: Tensor) -> Tensor:
        """Return the residual stream after this layer."""
        attention_BSF = attend(self.qkv(x_BSH), table_2SD, heads=self.heads, kv_heads=self.kv_heads)
        x_BSH = x_BSH + self.projection(attention_BSF)
        return x_BSH + self.moe(self.norm(x_BSH))


def next_token_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Return the mean cross-entropy in float32, nats a token."""
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten())


@torch.no_grad()
def initialize(model: nn.Module, config: ModelConfig) -> None:
    """Draw all matrices from a normal distribution, narrower where they add to the stream.

    Each of the 2 L matrices that write to the residual stream is scaled by ``1 / sqrt(2 L)``,
    so that the stream's variance does not grow with depth.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue
        writes = name.endswith(("projection.weight", "fc2_weight"))
        width = 0.02 / (2 * config.layers) ** 0.5 if writes else 0.02
        nn.init.normal_(parameter, std=width)
