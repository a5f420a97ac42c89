"""Experts on a GPU read what they saved in its pages: same bits, no copy back, in stream order."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

import backstash as bs
from backstash.stash import PagePool, Policy, Stash
from host_reads import no_host_reads
from stash_cases import Copying, assert_nothing_is_held
from stash_gpu_cases import GPU, LAYERS, Step, assert_equal

pytestmark = pytest.mark.gpu

PAGE = 16384
SLOTS = 2  # input and pre-activation
TOKENS, HIDDEN, FFN = 1024, 256, 128


class Experts:
    """Layers of a Mixture of Experts on buffers of one rank, with routing weights."""

    def __init__(self, activation: str = "swiglu") -> None:
        torch.manual_seed(0)
        dispatcher = bs.Local(capacity_factor=2.0, keep_experts=range(4))
        new = {"device": GPU, "dtype": torch.bfloat16}
        self.layers = torch.nn.ModuleList(
            bs.MoE(HIDDEN, FFN, 16, 4, activation=activation, dispatcher=dispatcher, **new)
            for _ in range(4)
        )
        self.x = torch.randn(TOKENS, HIDDEN, **new).requires_grad_()

    def loss(self, *handlers: object) -> Tensor:
        with bs.saving(*handlers):  # pyright: ignore[reportArgumentType]
            x = self.x
            for layer in self.layers:
                x = x + layer(x)
            return x.float().square().sum()

    def gradients(self, loss: Tensor, *, retain_graph: bool = False) -> list[Tensor]:
        inputs = [self.x, *self.layers.parameters()]
        grads = torch.autograd.grad(loss, inputs, allow_unused=True, retain_graph=retain_graph)
        return [loss.detach(), *(grad for grad in grads if grad is not None)]


@pytest.fixture(autouse=True)
def nothing_is_left() -> None:
    gc.collect()


@pytest.mark.parametrize("total", [0, 1, 700, 4096])
def test_a_step_of_experts_copies_nothing_back(total: int) -> None:
    stash = Stash(PagePool(64 * 2**20, device=GPU, page_bytes=PAGE))
    plain, ours = Step(), Step(stash)
    for turn in range(3):
        before = stash.stats()
        assert_equal(ours.gradients(ours, total), plain.gradients(plain, total))
        after = stash.stats()
        assert after.in_place - before.in_place == SLOTS * (LAYERS - (turn > 0))
        if turn:
            assert after.bytes_restored == before.bytes_restored
    assert_nothing_is_held(stash)


@pytest.mark.parametrize("activation", ["swiglu", "relu"])
def test_routing_weights_are_read_in_place_as_well(activation: str) -> None:
    experts = Experts(activation)
    # The weights of 2048 rows are larger than such a page.
    stash = Stash(PagePool(64 * 2**20, device=GPU, page_bytes=4096))
    wanted = experts.gradients(experts.loss())
    for _ in range(2):
        assert_equal(experts.gradients(experts.loss(stash)), wanted)
    before = stash.stats()
    with no_host_reads():
        found = experts.gradients(experts.loss(stash))
    assert_equal(found, wanted)
    after = stash.stats()
    assert after.in_place - before.in_place == 3 * 3
    assert after.bytes_restored == before.bytes_restored
    assert_nothing_is_held(stash)


def test_two_backwards_and_a_handler_without_reading_give_the_same_bits() -> None:
    experts = Experts()
    stash = Stash(PagePool(64 * 2**20, device=GPU, page_bytes=PAGE))
    wanted = experts.gradients(experts.loss())
    for handler in (stash, Copying(stash), stash):
        loss = experts.loss(handler)
        assert_equal(experts.gradients(loss, retain_graph=True), wanted)
        assert_equal(experts.gradients(loss), wanted)
        del loss
        assert_nothing_is_held(stash)


@pytest.mark.parametrize("policy", Policy, ids=lambda policy: policy.value)
def test_pages_in_host_memory_change_nothing(policy: Policy) -> None:
    experts = Experts()
    stash = Stash(PagePool(2**21, 2**26, device=GPU, page_bytes=PAGE), policy=policy)
    wanted = experts.gradients(experts.loss())
    for _ in range(3):
        assert_equal(experts.gradients(experts.loss(stash)), wanted)
    assert_nothing_is_held(stash)


def test_backward_on_another_stream_waits_for_the_pages_and_they_for_it() -> None:
    experts = Experts()
    stash = Stash(PagePool(64 * 2**20, device=GPU, page_bytes=PAGE))
    wanted = experts.gradients(experts.loss())
    side = torch.cuda.Stream()
    for _ in range(10):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loss = experts.loss(stash)
            found = experts.gradients(loss)
        del loss
        # Meanwhile pages that were given back are taken by another step on this stream.
        again = experts.gradients(experts.loss(stash))
        torch.cuda.current_stream().wait_stream(side)
        assert_equal(found, wanted)
        assert_equal(again, wanted)
    assert_nothing_is_held(stash)
