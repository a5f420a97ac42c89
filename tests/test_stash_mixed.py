"""A node that saves whole numbers beside values has the values alone compressed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import backstash as bs
from backstash import PagePool, Stash

ROWS, VALID = 512, 300


class _Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *buffers: Tensor) -> Tensor:
        bs.save_for_backward(ctx, *buffers)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        RESTORED.extend(bs.saved_values(ctx))
        return (dy.expand(3), *[None] * len(RESTORED))


RESTORED: list[Tensor] = []


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)], ids=str)
def test_values_are_compressed_and_whole_numbers_beside_them_are_not(
    order: tuple[int, ...],
) -> None:
    RESTORED.clear()
    buffers = [
        torch.randn(ROWS, 64),
        torch.randint(0, 2**40, (ROWS, 16)),
        torch.randint(0, 256, (ROWS, 64), dtype=torch.uint8),
    ]
    given = [buffers[i] for i in order]
    stash = Stash(PagePool(2**20, device="cpu", page_bytes=1024), compress=bs.MXFP8)
    with bs.saving(stash):
        for buffer in given:
            bs.mark_grouped_tensor(buffer, torch.tensor([VALID]))
        y = _Both.apply(torch.ones(3, requires_grad=True), *given)
    y.backward()
    back = dict(zip(order, RESTORED, strict=True))
    for place, buffer in enumerate(buffers):
        wanted = buffer[:VALID]
        if buffer.is_floating_point():
            wanted = bs.MXFP8.quantize(wanted).dequantize()
        assert torch.equal(back[place][:VALID], wanted)
