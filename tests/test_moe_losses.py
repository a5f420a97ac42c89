"""The router's losses against their sums over tokens and experts, on one rank and on two."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from backstash.moe import MoE, Router, RouterConfig, attach_loss

H, E, K = 17, 8, 3
by_score = pytest.mark.parametrize("score", ["softmax", "sigmoid"])
by_tokens = pytest.mark.parametrize("tokens", [0, 1, 63])


def make(config, *, top_k=K):
    torch.manual_seed(0)
    return Router(H, E, top_k, config=config, dtype=torch.float64)


@by_score
@by_tokens
def test_losses_and_their_gradients_are_their_definition(score, tokens):
    router = make(RouterConfig(score=score, aux_loss_weight=1.0, z_loss_weight=1.0))
    x = torch.randn(tokens, H, dtype=torch.float64, requires_grad=True)
    routing = router(x)
    logits = x @ router.weight.t()
    scores = torch.exp(logits) if score == "softmax" else 1 / (1 + torch.exp(-logits))
    balance = z = x.sum() * 0 + router.weight.sum() * 0
    for t in range(tokens):
        z = z + torch.log(torch.exp(logits[t]).sum()) ** 2 / tokens
        for e in range(E):
            share = routing.counts_E[e].item() / (tokens * K)
            balance = balance + E * share * scores[t, e] / scores[t].sum() / tokens
    for got, want in ((routing.losses.balance, balance), (routing.losses.z, z)):
        assert got.dtype is torch.float64
        torch.testing.assert_close(got, want)
        grads = torch.autograd.grad(got, (x, router.weight), retain_graph=True)
        wants = torch.autograd.grad(want, (x, router.weight), retain_graph=True)
        torch.testing.assert_close(grads, wants)


def test_an_even_load_has_a_balance_loss_of_one():
    router = make(RouterConfig(aux_loss_weight=1.0), top_k=E)
    loss = router(torch.randn(63, H, dtype=torch.float64)).losses.balance
    torch.testing.assert_close(loss.item(), 1.0)


def test_losses_nobody_asked_for_are_not_computed():
    losses = make(RouterConfig())(torch.randn(3, H, dtype=torch.float64)).losses
    assert losses.balance is None
    assert losses.z is None


def test_an_attached_loss_adds_its_gradient_and_changes_no_value():
    y = torch.randn(5, dtype=torch.bfloat16, requires_grad=True)
    loss = torch.tensor(3.0, requires_grad=True)
    out = attach_loss(y, loss)
    assert torch.equal(out, y)
    out.backward(torch.full_like(y, 7))
    assert y.grad is not None
    assert y.grad.eq(7).all()
    assert loss.grad == 1


CUTS = [0, 1, 11, 20]
SCORES = ["softmax", "sigmoid"]


def train(router, module, microbatches):
    """One step; the last loss, the gradient and the bias that come of it."""
    for x in microbatches:
        losses = module(x).losses
        loss = 2 * losses.balance + 3 * losses.z
        loss.backward()
    router.update_bias_()
    return loss.item(), router.weight.grad, router.expert_bias


def config_of(score, group=None):
    return RouterConfig(
        score=score, aux_loss_weight=1.0, z_loss_weight=1.0, bias_update_speed=0.5, group=group
    )


def run_rank(rank, path, x):
    """Train on this rank's tokens as data-parallel training does, and compare with one rank."""
    store = torch.distributed.FileStore(path, 2)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        for score in SCORES:
            for cut in CUTS:
                alone = make(config_of(score))
                wanted = train(alone, alone, x.chunk(2))
                router = make(config_of(score, dist.group.WORLD))
                parts = [half[:cut] if rank == 0 else half[cut:] for half in x.chunk(2)]
                got = train(router, DistributedDataParallel(router), parts)
                torch.testing.assert_close(got, wanted)
    finally:
        dist.destroy_process_group()


@pytest.mark.distributed
def test_losses_and_bias_do_not_depend_on_how_the_batch_is_cut_over_ranks(tmp_path):
    x = torch.randn(40, H, dtype=torch.float64)
    spawn(run_rank, (str(tmp_path / "store"), x), nprocs=2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_enters_no_collective(
    reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    try:
        monkeypatch.setattr(dist, "all_reduce", lambda x, group: entered.append(x.shape))
        config = RouterConfig(aux_loss_weight=0.1, z_loss_weight=0.1, group=dist.group.WORLD)
        moe, x = MoE(8, 4, 4, 2, router=config), torch.randn(5, 8, requires_grad=True)
        y: Any = checkpoint(moe, x, use_reentrant=reentrant)
        in_forward = list(entered)
        y.sum().backward()
    finally:
        dist.destroy_process_group()
    # The load, the mean scores, and the sum of the z loss.
    assert in_forward == [(4,), (4,), ()]
    assert entered == in_forward
