"""Causal attention over grouped heads with rotary embeddings: the part that has no weights.

The decoder of ours and its plain twin call the same function here, so whatever they differ
in does not come from attention.

Letters: B sequences, S positions, T = B * S tokens, N query heads, K key and value heads,
D width of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rotary_table(context: int, head_width: int, base: float) -> Tensor:
    """Return cosines and sines ``(2, S, D)`` in float32, for :func:`rotate`.

    Pair ``i`` of a head turns by ``base ** (-2 i / D)`` radians a position (Su et al., 2021,
    "RoFormer").  A pair is an element of the first half and the same of the second.
    """
    frequency = base ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angle_SP = torch.outer(torch.arange(context, dtype=torch.float64), frequency)
    angle_SD = torch.cat((angle_SP, angle_SP), dim=-1)
    return torch.stack((angle_SD.cos(), angle_SD.sin())).float()


def rotate(x_BSND: Tensor, table_2SD: Tensor) -> Tensor:
    """Turn each pair of each head by the angle of its position; both in one dtype."""
    cos_S1D, sin_S1D = table_2SD[:, : x_BSND.shape[1], None]
    first, second = x_BSND.chunk(2, dim=-1)
    return x_BSND * cos_S1D + torch.cat((-second, first), dim=-1) * sin_S1D


def attend(qkv_BSF: Tensor, table_2SD: Tensor, *, heads: int, kv_heads: int) -> Tensor:
    """Return the attention's output ``(B, S, N * D)`` from queries, keys and values.

    ``qkv_BSF`` holds all query heads, then all key heads, then all value heads.
    """
    qkv_BSND = qkv_BSF.unflatten(-1, (heads + 2 * kv_heads, -1))
    q, k, v = qkv_BSND.split((heads, kv_heads, kv_heads), dim=2)
    q, k = rotate(q, table_2SD), rotate(k, table_2SD)
    # Saved values that are views keep all of qkv alive; a copy of the few value heads does not.
    v = v.contiguous()
    if repeats_heads(q.dtype, q.device.type):
        k, v = (x.repeat_interleave(heads // kv_heads, dim=2) for x in (k, v))
    out_BNSD = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=True,
        enable_gqa=k.shape[2] != heads,
    )
    return out_BNSD.transpose(1, 2).flatten(2)


def repeats_heads(dtype: torch.dtype, device_type: str) -> bool:
    """Whether keys and values are copied for each query head that shares them.

    In float32, the GPU kernels that keep no S x S scores want as many key as query heads.
    """
    return device_type == "cuda" and dtype == torch.float32
