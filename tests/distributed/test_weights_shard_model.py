"""A model becomes shards in place, and what cannot is refused on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import nn
from twins import Stack

from backstash.errors import ConfigError, LayoutError, RecipeError, ShapeError
from backstash.moe import MoE
from backstash.nn import GroupedMLP, LayerNormMLP, Linear
from backstash.recipes import quantized_model_init
from backstash.weights import ShardOptions, shard_weights, sharded_weights

pytestmark = pytest.mark.distributed


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 12)
        self.mlp = LayerNormMLP(12, 10)
        self.moe = MoE(12, 8, 4, 2, shared_ffn_hidden_size=6)
        self.head = Linear(12, 7)


CHOSEN = [
    "mlp.fc1_weight",
    "mlp.fc2_weight",
    "moe.experts.fc1_weight",
    "moe.experts.fc2_weight",
    "moe.shared.fc1_weight",
    "moe.shared.fc2_weight",
    "head.weight",
]


def chosen(group: Any) -> None:
    model = Model()
    names = [name for name, _ in model.named_parameters()]
    sharding = shard_weights(model, group)
    assert list(sharded_weights(model)) == CHOSEN
    assert [name for name, _ in model.named_parameters()] == names
    assert [m.name for b in sharding.bundles for m in b.members] == CHOSEN
    model = Model()
    shard_weights(model, group, filter=lambda name, p: p.ndim == 3 and "experts" in name)
    assert list(sharded_weights(model)) == CHOSEN[2:4]


def test_the_weights_that_layers_ask_for_are_sharded_and_nothing_else(ranks: Ranks) -> None:
    ranks.run(chosen)


def bytes_here(group: Any) -> None:
    model = Model()
    full = {name: p.shape for name, p in model.named_parameters()}
    sharding = shard_weights(model, group)
    size = sharding.channel.size
    for name, weight in sharded_weights(model).items():
        rows = full[name][:-1].numel()
        unit = 1 if len(full[name]) == 2 or full[name][0] % size else full[name][1]
        assert weight.nbytes <= -(-rows // unit // size) * unit * full[name][-1] * 4
        assert weight.untyped_storage().nbytes() == weight.nbytes


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_holds_its_rows_and_no_more_memory(ranks: Ranks, size: int) -> None:
    ranks.run(bytes_here, size=size)


def in_place(group: Any) -> None:
    """Each whole weight is gone when the next is cut: never a second model in memory."""
    model = nn.ModuleList(Linear(64, 64, bias=False) for _ in range(6))
    whole_bytes = 64 * 64 * 4
    storages = [
        torch.multiprocessing.reductions.StorageWeakRef(p.untyped_storage())
        for p in model.parameters()
    ]
    alive = []
    cut = torch.Tensor.clone

    def counting(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        alive.append(sum(not s.expired() for s in storages))
        return cut(tensor, *args, **kwargs)

    torch.Tensor.clone = counting  # pyright: ignore[reportAttributeAccessIssue]
    try:
        shard_weights(model, group)
    finally:
        torch.Tensor.clone = cut
    # gloo's thread may hold the one before a moment longer than its broadcast takes.
    assert all(wanted <= a <= wanted + 1 for a, wanted in zip(alive, range(6, 0, -1), strict=True))
    assert sum(p.nbytes for p in model.parameters()) == 6 * whole_bytes // 2


def test_each_whole_weight_is_let_go_as_soon_as_its_shard_is_cut(ranks: Ranks) -> None:
    ranks.run(in_place)


def first_rank_counts(group: Any) -> Any:
    torch.manual_seed(torch.distributed.get_rank())
    model = Linear(4, 4)
    assert model.bias is not None
    mine = model.weight.sum().item(), model.bias.sum().item()
    sharding = shard_weights(model, group)
    total = sharding.channel.total(model.weight.data.sum())
    return (mine, (total.item(), model.bias.sum().item()))


def test_the_values_are_those_of_the_first_rank(ranks: Ranks) -> None:
    answers = ranks.run(first_rank_counts, size=3)
    (first, _) = answers[0]
    for _, now in answers:
        assert now == pytest.approx(first)


def refusals(group: Any) -> None:
    with pytest.raises(ConfigError, match="found nothing to shard in Embedding"):
        shard_weights(nn.Embedding(3, 4), group)
    with pytest.raises(ConfigError, match=r"embedding.weight belongs to a torch.nn.Embedding"):
        shard_weights(Model(), group, filter=lambda name, p: True)
    with pytest.raises(RecipeError, match="its scale belongs to the layer"):
        shard_weights(Model(), group, gather="float8_delayed")
    with pytest.raises(RecipeError, match="recipe must be one of"):
        shard_weights(Model(), group, gather="float3")
    with pytest.raises(ConfigError, match="prefetch is a number of gathers"):
        shard_weights(Model(), group, prefetch=-1)
    with pytest.raises(ConfigError, match="group must be a process group"):
        shard_weights(Model(), "everybody")
    with quantized_model_init("mxfp8"):
        quantized = Linear(64, 64)
    with pytest.raises(LayoutError, match="kept in low precision"):
        shard_weights(quantized, group)
    model = Stack(2)
    shard_weights(model, group)
    with pytest.raises(ConfigError, match="sharded already"):
        shard_weights(model, group)
    own = nn.ParameterDict({"a": torch.randn(3)})
    with pytest.raises(ShapeError, match="a weight to shard has shape"):
        shard_weights(own, group, filter=lambda name, p: True)


def test_what_cannot_be_sharded_is_refused(ranks: Ranks) -> None:
    ranks.run(refusals)


def other_models(group: Any) -> None:
    features = 4 + torch.distributed.get_rank()
    with pytest.raises(ConfigError, match="every rank must shard the same weights, but rank 1"):
        shard_weights(Linear(features, 4), group)


def test_ranks_with_other_models_all_raise(ranks: Ranks) -> None:
    ranks.run(other_models)


def by_expert_or_by_row(group: Any) -> list[list[tuple[int, ...]]]:
    shapes = []
    for split in ("auto", "experts", "rows"):
        model = GroupedMLP(4, 12, 9)
        shard_weights(model, group, options=ShardOptions(split=split))
        shapes.append([tuple(p.shape) for p in model.parameters()])
    return shapes


def test_experts_are_cut_whole_or_by_row(ranks: Ranks) -> None:
    # 4 experts of (18, 12) and (12, 9) on three ranks: 2, 2 and 0 experts, or a third of rows.
    answers = ranks.run(by_expert_or_by_row, size=3)
    assert [a[1][0] for a in answers] == [(2, 18, 12), (2, 18, 12), (0, 18, 12)]
    assert [a[2] for a in answers] == [[(24, 12), (16, 9)]] * 3
    assert [a[0] for a in answers] == [a[2] for a in answers]
    even = ranks.run(by_expert_or_by_row, size=2)
    assert even[0][0] == [(2, 18, 12), (2, 12, 9)]
