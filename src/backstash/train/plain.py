"""The same model in plain PyTorch, to compare with: same weights by the same names.

This is how one would write it with ``torch.nn`` and ordinary autograd operations, a loop
over the experts included.  It computes what :class:`~backstash.train.model.Decoder` computes
in high precision; only what autograd keeps differs.

Letters: T tokens, H width, E experts, K experts a token, R rows of one expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash.train.attention import attend, rotary_table
from backstash.train.config import ModelConfig
from backstash.train.model import Loss, next_token_loss


class PlainDecoder(nn.Module):
    """Twin of :class:`~backstash.train.model.Decoder`; load its state dict."""

    table_2SD: Tensor

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.hidden, dtype=dtype)
        self.layers = nn.ModuleList(PlainLayer(config, dtype=dtype) for _ in range(config.layers))
        self.head = NormLinear(config.hidden, config.vocabulary, dtype=dtype)
        self.register_buffer(
            "table_2SD",
            rotary_table(config.context, config.head_width, config.rotary_base),
            persistent=False,
        )

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return the logits ``(B, S, vocabulary)`` of each next token."""
        x_BSH = self.embedding(tokens_BS)
        table_2SD = self.table_2SD.to(x_BSH.dtype)
        for layer in self.layers:
            x_BSH = layer(x_BSH, table_2SD)
        return self.head(x_BSH)

    def loss(self, tokens_BS: Tensor, targets_BS: Tensor) -> Loss:
        """Return how surprised the model is by the targets."""
        logits_BSV = self(tokens_BS)
        counts = [m.counts_E for m in self.modules() if isinstance(m, PlainMoE)]
        return Loss(total=next_token_loss(logits_BSV, targets_BS), counts_LE=torch.stack(counts))


class PlainLayer(nn.Module):
    """Attention and experts, each added to the residual stream."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        features = config.heads * config.head_width
        kv_features = config.kv_heads * config.head_width
        self.qkv = NormLinear(config.hidden, features + 2 * kv_features, dtype=dtype)
        self.projection = nn.Linear(features, config.hidden, bias=False, dtype=dtype)
        self.norm = nn.RMSNorm(config.hidden, eps=1e-5, dtype=dtype)
        self.moe = PlainMoE(config, dtype=dtype)

    def forward(self, x_BSH: Tensor, table_2SD: Tensor) -> Tensor:
        """Return the residual stream after this layer."""
        attention_BSF = attend(self.qkv(x_BSH), table_2SD, heads=self.heads, kv_heads=self.kv_heads)
        x_BSH = x_BSH + self.projection(attention_BSF)
        return x_BSH + self.moe(self.norm(x_BSH))


class NormLinear(nn.Module):
    """An RMSNorm and a matrix after it."""

    def __init__(self, in_features: int, out_features: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features, dtype=dtype))
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize and multiply."""
        normalized = F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, eps=1e-5)
        return F.linear(normalized, self.weight)


class PlainRouter(nn.Module):
    """Softmax scores in float32; the best K of them, biased for the choice only."""

    expert_bias: Tensor

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden, dtype=dtype))
        self.register_buffer("expert_bias", torch.zeros(config.experts))

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts ``(T, K)`` of each token and their weights."""
        scores_TE = F.linear(x_TH.float(), self.weight.float()).softmax(-1)
        expert_TK = (scores_TE + self.expert_bias).topk(self.top_k, dim=-1).indices
        prob_TK = scores_TE.gather(1, expert_TK)
        if self.top_k > 1:
            prob_TK = prob_TK / prob_TK.sum(-1, keepdim=True)
        return expert_TK, prob_TK


class PlainExperts(nn.Module):
    """Weights of E gated feed-forward networks."""

    def __init__(self, experts: int, hidden: int, width: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.fc1_weight = nn.Parameter(torch.empty(experts, 2 * width, hidden, dtype=dtype))
        self.fc2_weight = nn.Parameter(torch.empty(experts, hidden, width, dtype=dtype))

    def forward(self, x_RH: Tensor, expert: int) -> Tensor:
        """Send the rows through one of the networks."""
        gate_RI, up_RI = F.linear(x_RH, self.fc1_weight[expert]).chunk(2, dim=-1)
        return F.linear(F.silu(gate_RI) * up_RI, self.fc2_weight[expert])


class PlainMoE(nn.Module):
    """Each token through K of E experts, one expert after the other."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.router = PlainRouter(config, dtype=dtype)
        sizes = (config.hidden, config.expert_width)
        self.experts = PlainExperts(config.experts, *sizes, dtype=dtype)
        self.shared = None
        if config.shared_width:
            self.shared = PlainExperts(1, config.hidden, config.shared_width, dtype=dtype)
        self.counts_E = torch.zeros(config.experts, dtype=torch.int32)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts."""
        x_TH = x_BSH.flatten(0, 1)
        expert_TK, prob_TK = self.router(x_TH)
        y_TH = torch.zeros_like(x_TH)
        experts = self.experts.fc1_weight.shape[0]
        for expert in range(experts):
            token_R, choice_R = (expert_TK == expert).nonzero(as_tuple=True)
            y_RH = self.experts(x_TH.index_select(0, token_R), expert)
            y_RH = y_RH * prob_TK[token_R, choice_R].unsqueeze(-1).to(y_RH.dtype)
            y_TH = y_TH.index_add(0, token_R, y_RH)
        self.counts_E = torch.bincount(expert_TK.flatten(), minlength=experts).int()
        if self.shared is not None:
            y_TH = y_TH + self.shared(x_TH, 0)
        return y_TH.view(x_BSH.shape)
