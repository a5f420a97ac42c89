"""What experts save they compute in pages: same bits, nothing is copied, in any order of use."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import backstash as bs
from backstash import kernels
from backstash.stash import Policy
from claimed_cases import LAYERS, SLOTS, TOKENS, Claiming, Experts, assert_equal
from host_reads import no_host_reads
from stash_cases import Copying, assert_nothing_is_held

by_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def nothing_is_left() -> None:
    gc.collect()


@by_device
def test_a_step_copies_nothing_and_gives_every_page_back(device: str) -> None:
    experts = Experts(device)
    stash, wanted = experts.stash(), experts.gradients(experts.loss())
    for turn in range(3):
        assert_equal(experts.gradients(experts.loss(stash)), wanted)
        stats = stash.stats()
        assert stats.claimed == LAYERS * (turn + 1)
        assert stats.in_place == SLOTS * stats.claimed
        assert stats.batches == stats.bytes_restored == 0
        assert_nothing_is_held(stash)


@by_device
def test_pages_are_taken_for_the_rows_that_came_and_no_more(device: str) -> None:
    experts = Experts(device)
    stash = experts.stash()
    loss = experts.loss(stash)
    used, pages = stash.stats().device_used, experts.page_bytes
    rows = [int(layer.last_load[:4].sum()) for layer in experts.layers]  # pyright: ignore
    row_bytes = 2 * experts.x.shape[1] * experts.x.itemsize
    # Each of four experts may leave most of a slab empty.
    slab_bytes = 64 * row_bytes
    whole = sum(-(-count // 64) * slab_bytes for count in rows)
    assert sum(rows) * row_bytes <= used * pages <= whole + 3 * LAYERS * slab_bytes
    del loss
    assert_nothing_is_held(stash)


@by_device
def test_two_backwards_and_a_handler_without_reading_give_the_same_bits(device: str) -> None:
    experts = Experts(device)
    stash, wanted = experts.stash(), experts.gradients(experts.loss())
    for handler in (stash, Claiming(stash), Copying(stash), stash):
        loss = experts.loss(handler)
        assert_equal(experts.gradients(loss, retain_graph=True), wanted)
        assert_equal(experts.gradients(loss), wanted)
        del loss
        assert_nothing_is_held(stash)


@by_device
def test_whoever_looks_at_what_was_saved_sees_the_rows(device: str) -> None:
    experts = Experts(device)
    expert_TK = torch.randint(0, 4, (TOKENS, 2), device=device)
    source, slots, counts = kernels.sort_by_expert(expert_TK, 4)
    rows = bs.RowMap(source, slots, counts.sum().view(1).int())
    found = []
    for handlers in ([], [experts.stash()]):
        with bs.saving(*handlers):
            y = experts.layers[0].experts(experts.x, counts, rows=rows)  # pyright: ignore
        node: Any = y.grad_fn
        found.append([t for t in node.saved_tensors if t is not None])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@by_device
@pytest.mark.parametrize("policy", Policy, ids=lambda policy: policy.value)
def test_where_there_may_be_no_room_the_policy_decides_as_ever(device: str, policy: Policy) -> None:
    experts = Experts(device)
    wanted = experts.gradients(experts.loss())
    for pages in (0, 6, 20, 40):
        stash = experts.stash(pages, 400, policy=policy)
        for _ in range(3):
            assert_equal(experts.gradients(experts.loss(stash)), wanted)
        assert_nothing_is_held(stash)


@by_device
def test_with_nobody_watching_a_launch_without_room_leaves_a_flag_and_zeros(
    device: str,
) -> None:
    experts = Experts(device)
    stash = experts.stash(8)
    with stash.unattended():
        loss = experts.loss(stash)
        grads = experts.gradients(loss)
    assert all(grad.isfinite().all() for grad in grads)
    assert stash.stats().overflows > 0
    del loss
    stash.settle()
    stats = stash.stats()
    assert stats.device_used == 0
    # What comes after it is as if it had not been.
    wanted = experts.gradients(experts.loss())
    again = experts.stash()
    assert_equal(experts.gradients(experts.loss(again)), wanted)


@by_device
def test_a_meter_in_front_counts_what_it_counts_without_a_stash(device: str) -> None:
    experts = Experts(device)
    stash, alone, in_front = experts.stash(), bs.Meter(), bs.Meter()
    experts.loss(alone)
    experts.loss(in_front, stash)
    assert stash.stats().claimed == LAYERS
    assert (in_front.bytes, in_front.calls) == (alone.bytes, alone.calls)


@by_device
def test_a_handler_that_knows_nothing_of_places_is_offered_tensors(device: str) -> None:
    experts = Experts(device)
    stash = experts.stash()
    loss = experts.loss(Copying(experts.stash()), stash)
    assert stash.stats().claimed == 0
    assert_equal(experts.gradients(loss), experts.gradients(experts.loss()))


@by_device
def test_who_waits_for_room_waits_to_compute_in_pages_too(device: str) -> None:
    experts = Experts(device)
    wanted = experts.gradients(experts.loss())
    rows = [int(layer.last_load[:4].sum()) for layer in experts.layers]  # pyright: ignore
    most = 2 * max(-(-count // 64) + 4 for count in rows) * LAYERS * 16
    stash = experts.stash(most, policy=Policy.WAIT)
    for _ in range(3):
        assert_equal(experts.gradients(experts.loss(stash)), wanted)
        assert_nothing_is_held(stash)
    assert stash.stats().claimed == 3 * LAYERS


@by_device
def test_a_graph_that_is_dropped_gives_its_pages_back(device: str) -> None:
    experts = Experts(device)
    stash = experts.stash()
    loss = experts.loss(stash)
    del loss
    assert_nothing_is_held(stash)


@by_device
def test_what_is_claimed_and_never_saved_is_given_back(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from backstash.nn.feed_forward import FeedForward

    experts = Experts(device)
    stash, wanted = experts.stash(), experts.gradients(experts.loss())
    with monkeypatch.context() as patch:
        patch.setattr(FeedForward, "forward_in_slabs", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            experts.loss(stash)
    assert_equal(experts.gradients(experts.loss(stash)), wanted)
    assert_nothing_is_held(stash)


@by_device
@pytest.mark.parametrize("recipe", ["mxfp8", "float8_current"])
def test_under_other_recipes_and_compressed_everything_is_stashed_as_ever(
    device: str, recipe: str
) -> None:
    experts = Experts(device, recipe=recipe)
    stash, wanted = experts.stash(), experts.gradients(experts.loss())
    for _ in range(2):
        assert_equal(experts.gradients(experts.loss(stash)), wanted)
    assert stash.stats().claimed == 0
    assert_nothing_is_held(stash)


@by_device
def test_compressed_values_are_copied_as_ever(device: str) -> None:
    experts = Experts(device)
    stash = experts.stash(compress=bs.MXFP8)
    experts.gradients(experts.loss(stash))
    assert stash.stats().claimed == 0
    assert stash.stats().batches > 0
    assert_nothing_is_held(stash)


@pytest.mark.parametrize(
    ("page_bytes", "claimed", "device"),
    [
        (256, LAYERS, "cpu"),
        (64, 0, "cpu"),  # no column of 64 rows
        pytest.param(131072, 0, "cuda", marks=pytest.mark.gpu),  # wider than the rows
        pytest.param(32768, 0, "cuda", marks=pytest.mark.gpu),  # narrower than tiles of products
    ],
)
def test_pages_that_hold_no_slab_are_filled_by_copies(
    page_bytes: int, claimed: int, device: str
) -> None:
    experts = Experts(device)
    experts.page_bytes = page_bytes
    stash, wanted = experts.stash(), experts.gradients(experts.loss())
    assert_equal(experts.gradients(experts.loss(stash)), wanted)
    assert stash.stats().claimed == claimed
    assert_nothing_is_held(stash)


@by_device
def test_a_rank_without_rows_claims_no_page(device: str) -> None:
    experts = Experts(device)
    for layer in experts.layers:
        # Nobody is sent to the experts that are here.
        layer.router.expert_bias[:4] = -1e4  # pyright: ignore
    stash, wanted = experts.stash(), experts.gradients(experts.loss())
    loss = experts.loss(stash)
    assert (stash.stats().claimed, stash.stats().device_used) == (LAYERS, 0)
    assert_equal(experts.gradients(loss), wanted)
    del loss
    assert_nothing_is_held(stash)


@by_device
@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_inside_a_checkpoint_and_around_one_gradients_are_the_same(
    device: str, reentrant: bool
) -> None:
    experts = Experts(device)
    stash, wanted = experts.stash(), experts.gradients(experts.loss())

    def inside(x: Tensor, layer: Any) -> Tensor:
        with bs.saving(stash):
            return x + layer(x)

    for handlers, run in (([], inside), ([stash], lambda x, layer: x + layer(x))):
        for _ in range(2):
            x = experts.x
            with bs.saving(*handlers):
                for layer in experts.layers:
                    x = checkpoint(run, x, layer, use_reentrant=reentrant)
            loss = x.float().square().sum()
            # With reentry only .grad can be asked for.
            experts.x.grad = None
            experts.layers.zero_grad()
            loss.backward()
            leaves = [experts.x, *experts.layers.parameters()]
            grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
            assert_equal([loss.detach(), *grads], wanted)
            del loss, x
            assert_nothing_is_held(stash)


@by_device
@pytest.mark.parametrize("is_outside", [True, False], ids=["outside", "inside"])
def test_beside_hooks_of_others_gradients_are_the_same(device: str, is_outside: bool) -> None:
    experts = Experts(device)
    stash, wanted = experts.stash(), experts.gradients(experts.loss())
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
    contexts = [hooks, bs.saving(stash)] if is_outside else [bs.saving(stash), hooks]
    for _ in range(2):
        with contexts[0], contexts[1]:
            loss = experts.loss_here()
        assert_equal(experts.gradients(loss), wanted)
        del loss
    assert (stash.stats().claimed > 0) == is_outside
    assert_nothing_is_held(stash)


@by_device
def test_of_two_stashes_the_second_takes_what_the_first_has_no_room_for(device: str) -> None:
    experts = Experts(device)
    small, large = experts.stash(1, policy=Policy.KEEP), experts.stash()
    wanted = experts.gradients(experts.loss())
    for _ in range(2):
        assert_equal(experts.gradients(experts.loss(small, large)), wanted)
    assert (small.stats().claimed, large.stats().claimed) == (0, 2 * LAYERS)
    assert_nothing_is_held(small)
    assert_nothing_is_held(large)


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu_and_streams_keep_their_order() -> None:
    experts = Experts("cuda")
    stash, wanted = experts.stash(), experts.gradients(experts.loss())
    experts.gradients(experts.loss(stash))
    side = torch.cuda.Stream()
    for _ in range(10):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), no_host_reads():
            loss = experts.loss(stash)
            found = experts.gradients(loss)
        del loss
        # Meanwhile pages that were given back are taken by another step on this stream.
        again = experts.gradients(experts.loss(stash))
        torch.cuda.current_stream().wait_stream(side)
        assert_equal(found, wanted)
        assert_equal(again, wanted)
    assert_nothing_is_held(stash)


@pytest.mark.gpu
def test_a_graph_computes_in_pages_whatever_comes() -> None:
    experts = Experts("cuda")
    stash = experts.stash()

    def step() -> list[Tensor]:
        grads = experts.gradients(experts.loss(stash))
        stash.settle()
        return grads

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours = step()
    for _ in range(20):
        with torch.no_grad():
            experts.x.copy_(torch.randn_like(experts.x))
        graph.replay()
        assert_equal(ours, experts.gradients(experts.loss()))
    assert stash.stats().overflows == 0
    assert stash.stats().device_used == 0
