"""Models, recipes, hooks and failures drawn at random, and run against the plain run.

A model of a few layers runs once without anything, and then under hooks that are nested at
random, partly recomputed, sometimes failing in forward or in backward, sometimes abandoned,
sometimes differentiated twice.  Every gradient that comes out is compared bit for bit, and at the
end no stash holds a page.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import backstash as bs

ACTIVATIONS = ("gelu", "relu", "silu", "swiglu", "geglu", "reglu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """What programs are drawn from."""

    device: str
    features: int
    inner: Sequence[int]
    dtypes: Sequence[torch.dtype]
    recipes: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    page_bytes: int

    def new(self, dtype: torch.dtype) -> dict[str, Any]:
        return {"dtype": dtype, "device": self.device}


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

    def __init__(self, rng: random.Random, world: World, dtype: torch.dtype) -> None:
        super().__init__()
        self.groups, self.seed, H = rng.choice([1, 3, 5]), rng.random(), world.features
        makes_mlp, new = rng.random() < 0.5, world.new(dtype)
        self.layer = (
            bs.GroupedMLP(self.groups, H, world.inner[0], **new)
            if makes_mlp
            else bs.GroupedLinear(self.groups, H, H, **new)
        )

    def forward(self, x: Tensor) -> Tensor:
        rng, rows = random.Random(self.seed), x.shape[:-1].numel()
        ends = sorted(rng.randrange(rows + 1) for _ in range(self.groups))
        counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        return self.layer(x, counts if rng.random() < 0.5 else torch.tensor(counts))


def random_layer(rng: random.Random, world: World, dtype: torch.dtype) -> nn.Module:
    inner, experts = rng.choice(world.inner), rng.choice([3, 4, 8])
    H, new = world.features, world.new(dtype)
    router = bs.RouterConfig(
        score=rng.choice(["softmax", "sigmoid"]), aux_loss_weight=rng.choice([0.0, 0.1])
    )
    room = rng.choice([None, 0.5, 1.0, 2.0, 4.0])
    local = bs.Local(capacity_factor=room, keep_experts=rng.choice([None, range(2), (2, 1)]))
    shared, top_k = rng.choice([0, 16]), rng.choice([1, 2, 3])
    makers: list[Callable[[], nn.Module]] = [
        lambda: bs.Linear(H, H, **new),
        lambda: bs.LayerNormLinear(H, H, normalization="RMSNorm", **new),
        lambda: bs.LayerNormMLP(H, inner, activation=rng.choice(ACTIVATIONS), **new),
        lambda: Grouped(rng, world, dtype),
        lambda: bs.MoE(H, inner, experts, top_k, router=router, **new),
        lambda: bs.MoE(H, inner, experts, 2, dispatcher=local, **new),
        lambda: bs.MoE(H, inner, experts, 1, shared_ffn_hidden_size=shared, **new),
        lambda: nn.Sequential(bs.Linear(H, H, **new), nn.ReLU(inplace=True)),
        lambda: nn.Sequential(nn.Linear(H, H, **new), nn.GELU()),
    ]
    return rng.choice(makers)()


class Model(nn.Module):
    """Layers with residuals, each of which may be run again in backward, in either mode."""

    def __init__(self, rng: random.Random, world: World, dtype: torch.dtype) -> None:
        super().__init__()
        count = rng.randrange(1, 5)
        self.layers = nn.ModuleList(random_layer(rng, world, dtype) for _ in range(count))
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


def random_hooks(rng: random.Random, world: World, stashes: list[bs.Stash]) -> Any:
    def stash() -> Any:
        pool = bs.PagePool(
            rng.choice([4, 40, 1000]) * world.page_bytes,
            host_bytes=rng.choice([0, 20]) * world.page_bytes,
            device=world.device,
            page_bytes=world.page_bytes,
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


def run_program(world: World, seed: int) -> None:
    """Draw a program, run it, and compare it with the plain run of its model."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype, shape = rng.choice(world.dtypes), rng.choice(world.shapes)
    model, wants_dx = Model(rng, world, dtype), rng.random() < 0.7
    x = torch.randn(*shape, world.features, requires_grad=wants_dx, **world.new(dtype))
    for parameter in model.parameters():
        parameter.requires_grad_(rng.random() < 0.8)
    leaves = [leaf for leaf in (x, *model.parameters()) if leaf.requires_grad]
    override: Any = rng.choice([{}, {}, *({"backward_override": o} for o in bs.BackwardOverride)])
    recipe = bs.recipe(rng.choice(world.recipes), **override)

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
                    hooks.enter_context(random_hooks(rng, world, stashes))
                y = forward()
            assert torch.equal(y, expected)
            for _ in range(0 if is_abandoned else 1 + is_retained):
                for one, other in zip(gradients(y, is_retained=is_retained), wanted, strict=True):
                    assert (one is None and other is None) or torch.equal(one, other)  # pyright: ignore
        y = None
    for stash in stashes:
        assert (stash.stats().device_used, stash.stats().host_used) == (0, 0)
