"""What goes over the wire is what the formulas say, and is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks

from backstash.nn import Linear
from backstash.recipes import autocast, recipe
from backstash.weights import ShardOptions, shard_weights

pytestmark = pytest.mark.distributed

N, K = 512, 256
#: Bytes of an element in each gather, with the scales of its blocks; and reduced in bfloat16.
GATHERED = {
    ("high_precision", ()): 2.0,
    ("mxfp8", ()): 1 + 1 / 32,
    ("mxfp8", ("two_d",)): 1 + 1 / 32**2,
    ("nvfp4", ()): 1 / 2 + 1 / 16**2,
    ("nvfp4", ("two_d", "hadamard")): 1 / 2 + 1 / 16,
    ("float8_block", ()): 1 + 4 / 128**2,
}
REDUCED = 2.0


def one_step(group: Any, name: str, flags: tuple[str, ...], *, wide: bool) -> float:
    """Bytes on the wire for each element of the weight, in a forward and a backward."""
    chosen = recipe(name, **{flag: flag == "two_d" and name == "mxfp8" for flag in flags})
    model = Linear(K, N, bias=False, dtype=torch.bfloat16)
    options = ShardOptions(accumulate=torch.float32 if wide else None)
    sharding = shard_weights(model, group, gather=chosen, options=options)
    x = torch.randn(4, K, dtype=torch.bfloat16, requires_grad=True)
    with autocast(recipe=chosen):
        y = model(x)
    y.sum().backward()
    scalars = 2 * 4 if name == "nvfp4" else 0  # the largest magnitude of all, in float32
    return (sharding.wire_bytes - scalars) / (N * K)


@pytest.mark.parametrize("wide", [False, True], ids=["added in bfloat16", "added in float32"])
@pytest.mark.parametrize(("name", "flags"), GATHERED, ids=str)
def test_an_element_costs_two_gathers_and_a_reduction(
    ranks: Ranks, name: str, flags: tuple[str, ...], *, wide: bool
) -> None:
    wanted = 2 * GATHERED[name, flags] + REDUCED
    for size in (2, 4):
        assert ranks.run(step_of(name, flags, wide=wide), size=size) == [wanted] * size


def step_of(name: str, flags: tuple[str, ...], *, wide: bool) -> Any:
    import functools

    return functools.partial(one_step, name=name, flags=flags, wide=wide)


def test_the_table_of_bytes_an_element() -> None:
    table = {name: round(2 * each + REDUCED, 2) for name, each in GATHERED.items()}
    assert table["high_precision", ()] == 6.00
    assert table["mxfp8", ()] == 4.06
    assert table["nvfp4", ("two_d", "hadamard")] == 3.12  # 3.125
    assert table["nvfp4", ()] == 3.01


def frozen(group: Any) -> float:
    model = Linear(K, N, bias=False, dtype=torch.bfloat16)
    model.weight.requires_grad_(False)
    sharding = shard_weights(model, group)
    x = torch.randn(4, K, dtype=torch.bfloat16)
    model(x.requires_grad_()).sum().backward()
    return sharding.wire_bytes / (N * K)


def no_input_gradient(group: Any) -> float:
    model = Linear(K, N, bias=False, dtype=torch.bfloat16)
    sharding = shard_weights(model, group)
    model(torch.randn(4, K, dtype=torch.bfloat16)).sum().backward()
    return sharding.wire_bytes / (N * K)


def test_what_nobody_needs_does_not_travel(ranks: Ranks) -> None:
    assert ranks.run(frozen) == [4.0] * 2
    assert ranks.run(no_input_gradient) == [4.0] * 2


def agreements(group: Any) -> int:
    model = Linear(K, N)
    sharding = shard_weights(model, group)
    x = torch.randn(4, K, requires_grad=True)
    model(x).sum().backward()
    return sharding.channel.agreements


def test_each_collective_and_each_end_of_a_pass_is_agreed_on_once(ranks: Ranks) -> None:
    # Gather, end of forward, gather again, reduce, end of backward.
    assert ranks.run(agreements, size=3) == [5] * 3
