"""A GPU as torch's default device: what belongs on the host is still made there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import backstash as bs
from stash_cases import assert_nothing_is_held

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@pytest.fixture
def default_gpu() -> Iterator[None]:
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


def gradients(moe: bs.MoE, x: Tensor, *handlers: bs.Stash) -> list[Tensor]:
    with bs.saving(*handlers):
        y = moe(x)
    y += x  # as in a residual: what a layer returns may be changed in place
    return list(torch.autograd.grad(y.float().square().mean(), list(moe.parameters())))


@pytest.mark.parametrize("recipe", ["high_precision", "mxfp8"])
def test_a_stash_works_with_a_gpu_as_default_device(recipe: str, default_gpu: None) -> None:
    moe = bs.MoE(256, 256, 8, 2, dispatcher=bs.Local(capacity_factor=2.0), dtype=BF16)
    x = torch.randn(2, 300, 256, dtype=BF16, requires_grad=True)
    stash = bs.Stash(bs.PagePool(32 << 20, host_bytes=1 << 20, page_bytes=4096))
    with bs.autocast(recipe=recipe):
        plain, kept = gradients(moe, x), gradients(moe, x, stash)
    assert all(p.is_cuda for p in moe.parameters())
    assert all(map(torch.equal, plain, kept))
    assert stash.stats().bytes_stashed > 0
    assert_nothing_is_held(stash)


def test_counts_as_a_list_work_with_a_gpu_as_default_device(default_gpu: None) -> None:
    experts = bs.GroupedMLP(4, 256, 128, dtype=BF16)
    x = torch.randn(3, 50, 256, dtype=BF16, requires_grad=True)
    counts = [70, 0, 79, 1]
    assert torch.equal(experts(x, counts), experts(x, torch.tensor(counts, device="cpu")))
    on_host = bs.GroupedMLP(4, 32, 16, device="cpu")
    assert on_host(torch.randn(10, 32, device="cpu"), [1, 2, 3, 4]).device.type == "cpu"
