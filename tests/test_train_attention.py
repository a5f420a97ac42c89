"""Rotation keeps lengths and knows only distances; attention sees no later position."""

from __future__ import annotations

import math

import pytest
import torch

from backstash.train.attention import attend, rotary_table, rotate


def test_a_pair_turns_by_its_frequency_times_its_position() -> None:
    table_2SD = rotary_table(5, 4, 100.0)
    x = torch.zeros(1, 5, 1, 4)
    x[..., 0] = 1.0
    x[..., 1] = 1.0
    y = rotate(x, table_2SD)[0, :, 0]
    for position in range(5):
        slow = position * 100.0**-0.5
        wanted = [math.cos(position), math.cos(slow), math.sin(position), math.sin(slow)]
        assert y[position].tolist() == pytest.approx(wanted, abs=1e-6)


def test_rotation_keeps_lengths_and_products_of_equal_distances() -> None:
    table_2SD = rotary_table(16, 8, 10000.0)
    q, k = torch.randn(8), torch.randn(8)
    q_SD = rotate(q.expand(1, 16, 1, 8), table_2SD)[0, :, 0]
    k_SD = rotate(k.expand(1, 16, 1, 8), table_2SD)[0, :, 0]
    torch.testing.assert_close(q_SD.norm(dim=-1), q.norm().expand(16))
    product_SS = q_SD @ k_SD.t()
    for distance in range(4):
        diagonal = product_SS.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (6, 1)])
def test_attention_is_the_softmax_of_products(heads: int, kv_heads: int) -> None:
    width, positions = 6, 7
    qkv = torch.randn(2, positions, (heads + 2 * kv_heads) * width)
    table = rotary_table(positions, width, 100.0)
    out = attend(qkv, table, heads=heads, kv_heads=kv_heads)
    parts = qkv.double().unflatten(-1, (-1, width))
    q = rotate(parts[:, :, :heads], table.double())
    k = rotate(parts[:, :, heads : heads + kv_heads], table.double())
    v = parts[:, :, heads + kv_heads :]
    mask = torch.ones(positions, positions, dtype=torch.bool).tril()
    for head in range(heads):
        shared = head * kv_heads // heads
        scores = q[:, :, head] @ k[:, :, shared].transpose(1, 2) / math.sqrt(width)
        wanted = scores.masked_fill(~mask, -math.inf).softmax(-1) @ v[:, :, shared]
        got = out[..., head * width : (head + 1) * width]
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


def test_no_position_sees_a_later_one() -> None:
    qkv = torch.randn(1, 6, 3 * 4)
    table = rotary_table(6, 4, 100.0)
    before = attend(qkv, table, heads=1, kv_heads=1)
    qkv[:, 3:] = torch.randn(1, 3, 12)
    after = attend(qkv, table, heads=1, kv_heads=1)
    assert torch.equal(after[:, :3], before[:, :3])
    assert not torch.equal(after[:, 3:], before[:, 3:])
