"""Models, recipes, hooks and failures drawn at random: gradients are those of the plain run.

A model of a few layers runs once without anything, and then under hooks that are nested at
random, partly recomputed, sometimes failing in forward or in backward, sometimes abandoned,
sometimes differentiated twice.  Every gradient that comes out is compared bit for bit, and at the
end no stash holds a page.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import backstash as bs

H = 64
PAGE = 4096
SEEDS, MANY_SEEDS = range(60), range(1000, 4000)
ACTIVATIONS = ("gelu", "relu", "silu", "swiglu", "geglu", "reglu")
RECIPES = [name for name in bs.recipe_names() if name != "float8_delayed"]  # it learns in between


class Broken(Exception):
    """What a bomb raises."""


class Bomb(nn.Module):
    """Passes rows on, unless it is told to fail."""

    fails_forward = fails_backward = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails_forward:
            raise Broken
        if self.fails_backward and x.requires_grad and torch.is_grad_enabled():
            x = x * 1
            x.register_hook(self._fail)
        return x

    def _fail(self, grad: Tensor) -> None:
        raise Broken


class Grouped(nn.Module):
    """A grouped layer with groups of any sizes, some of them empty, and perhaps a tail."""

    def __init__(self, rng: random.Random, dtype: torch.dtype) -> None:
        super().__init__()
        self.groups, self.seed = rng.choice([1, 3, 5]), rng.random()
        makes_mlp = rng.random() < 0.5
        self.layer = (
            bs.GroupedMLP(self.groups, H, 32, dtype=dtype)
            if makes_mlp
            else bs.GroupedLinear(self.groups, H, H, dtype=dtype)
        )

    def forward(self, x: Tensor) -> Tensor:
        rng, rows = random.Random(self.seed), x.shape[:-1].numel()
        ends = sorted(rng.randrange(rows + 1) for _ in range(self.groups))
        counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        return self.layer(x, counts if rng.random() < 0.5 else torch.tensor(counts))


def random_layer(rng: random.Random, dtype: torch.dtype) -> nn.Module:
    inner, experts = rng.choice([16, 24, 64]), rng.choice([3, 4, 8])
    router = bs.RouterConfig(
        score=rng.choice(["softmax", "sigmoid"]), aux_loss_weight=rng.choice([0.0, 0.1])
    )
    room = rng.choice([None, 0.5, 1.0, 2.0, 4.0])
    local = bs.Local(capacity_factor=room, keep_experts=rng.choice([None, range(2), (2, 1)]))
    shared, top_k = rng.choice([0, 16]), rng.choice([1, 2, 3])
    makers: list[Callable[[], nn.Module]] = [
        lambda: bs.Linear(H, H, dtype=dtype),
        lambda: bs.LayerNormLinear(H, H, normalization="RMSNorm", dtype=dtype),
        lambda: bs.LayerNormMLP(H, inner, activation=rng.choice(ACTIVATIONS), dtype=dtype),
        lambda: Grouped(rng, dtype),
        lambda: bs.MoE(H, inner, experts, top_k, router=router, dtype=dtype),
        lambda: bs.MoE(H, inner, experts, 2, dispatcher=local, dtype=dtype),
        lambda: bs.MoE(H, inner, experts, 1, shared_ffn_hidden_size=shared, dtype=dtype),
        lambda: nn.Sequential(bs.Linear(H, H, dtype=dtype), nn.ReLU(inplace=True)),
        lambda: nn.Sequential(nn.Linear(H, H, dtype=dtype), nn.GELU()),
    ]
    return rng.choice(makers)()


class Model(nn.Module):
    """Layers with residuals, each of which may be run again in backward, in either mode."""

    def __init__(self, rng: random.Random, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(random_layer(rng, dtype) for _ in range(rng.randrange(1, 5)))
        self.bomb = Bomb()
        self.layers.insert(rng.randrange(len(self.layers) + 1), self.bomb)
        self.modes = [rng.choice([None, None, False, True]) for _ in self.layers]
        self.is_checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        for layer, mode in zip(self.layers, self.modes, strict=True):
            # A reentrant region needs an input that wants a gradient.
            again = self.is_checkpointed and mode is not None and (x.requires_grad or not mode)
            y: Any = checkpoint(layer, x, use_reentrant=mode) if again else layer(x)
            x = x + y
        return x


def random_hooks(rng: random.Random, stashes: list[bs.Stash]) -> Any:
    def stash() -> Any:
        pool = bs.PagePool(
            rng.choice([4, 40, 1000]) * PAGE,
            host_bytes=rng.choice([0, 20]) * PAGE,
            device="cpu",
            page_bytes=PAGE,
        )
        options: Any = {"policy": rng.choice(list(bs.Policy)), "take": rng.choice(list(bs.Take))}
        # Layers of torch compute with every row.
        stashes.append(bs.Stash(pool, tail=bs.Tail.ZEROS, ahead=rng.choice([0, 1, 2]), **options))
        return bs.saving(stashes[-1], bs.Meter())

    makers: list[Callable[[], Any]] = [
        contextlib.nullcontext,
        lambda: saved_tensors_hooks(lambda t: t.detach(), lambda t: t),
        lambda: saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t),
        lambda: bs.saving(bs.Meter()),
        stash,
        stash,
    ]
    return rng.choice(makers)()


def run_program(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64])
    model, shape = Model(rng, dtype), rng.choice([(1,), (37,), (2, 90), (0,), (3, 1, 5)])
    x = torch.randn(*shape, H, dtype=dtype, requires_grad=rng.random() < 0.7)
    for parameter in model.parameters():
        parameter.requires_grad_(rng.random() < 0.8)
    leaves = [leaf for leaf in (x, *model.parameters()) if leaf.requires_grad]
    override: Any = rng.choice([{}, {}, *({"backward_override": o} for o in bs.BackwardOverride)])
    recipe = bs.recipe(rng.choice(RECIPES), **override)

    def forward() -> Tensor:
        with bs.autocast(recipe=recipe):
            return model(x)

    def gradients(y: Tensor, *, is_retained: bool = False) -> list[Tensor | None]:
        for leaf in leaves:
            leaf.grad = None
        y.backward(dy, retain_graph=is_retained)
        return [leaf.grad for leaf in leaves]

    expected = forward()
    dy = torch.randn_like(expected)
    if not expected.requires_grad:
        return
    wanted = gradients(expected)
    model.is_checkpointed = True
    stashes: list[bs.Stash] = []
    for _ in range(rng.randrange(1, 4)):
        model.bomb.fails_forward, model.bomb.fails_backward = rng.random() < 0.1, rng.random() < 0.1
        is_abandoned, is_retained = rng.random() < 0.1, rng.random() < 0.3
        with contextlib.suppress(Broken):
            with contextlib.ExitStack() as hooks:
                for _ in range(rng.randrange(3)):
                    hooks.enter_context(random_hooks(rng, stashes))
                y = forward()
            assert torch.equal(y, expected)
            for _ in range(0 if is_abandoned else 1 + is_retained):
                for one, other in zip(gradients(y, is_retained=is_retained), wanted, strict=True):
                    assert (one is None and other is None) or torch.equal(one, other)  # pyright: ignore
        y = None
    for stash in stashes:
        assert (stash.stats().device_used, stash.stats().host_used) == (0, 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_hooks_and_failures_gradients_are_those_of_the_plain_run(seed: int) -> None:
    run_program(seed)


@pytest.mark.slow
def test_many_more_of_them() -> None:
    for seed in MANY_SEEDS:
        run_program(seed)
