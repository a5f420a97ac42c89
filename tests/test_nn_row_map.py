"""A row map says where the rows come from, and refuses tokens it was not made for."""

from __future__ import annotations

import pytest
import torch

from backstash.errors import ConfigError, DeviceError, DtypeError, ShapeError
from backstash.nn import GroupedMLP, RowMap
from nn_cases import FFN, G, H, routing

SOURCE, SLOTS = torch.tensor([0, 1, 0, 1]), torch.tensor([[0, 2], [1, 3]])


def test_it_knows_how_many_rows_are_gathered() -> None:
    assert RowMap(SOURCE, SLOTS).rows == 4
    assert RowMap(SOURCE.int(), SLOTS.int()).rows == 4


def test_indices_that_cannot_be_are_refused() -> None:
    with pytest.raises(ShapeError, match="slots_TK must be a tensor of 2"):
        RowMap(SOURCE, SOURCE)
    with pytest.raises(ShapeError, match="source_R must be a tensor of 1"):
        RowMap(SLOTS, SLOTS)
    with pytest.raises(DtypeError, match=r"source_R must be int32 or int64, got torch\.float32"):
        RowMap(SOURCE.float(), SLOTS)
    with pytest.raises(DeviceError, match="source_R is on meta and slots_TK on cpu"):
        RowMap(SOURCE.to("meta"), SLOTS)


@pytest.mark.parametrize("index", [-1, 7, 99])
def test_tokens_and_rows_that_are_not_there_are_refused(index: int) -> None:
    rows, counts = routing()
    module, x = GroupedMLP(G, H, FFN), torch.randn(7, H)
    wrong = RowMap(rows.source_R.clone().fill_(index), rows.slots_TK)
    with pytest.raises(
        ConfigError, match=rf"name tokens from 0 to 6, got {index} to {index}; pass"
    ):
        module(x, counts, rows=wrong)
    index *= 2
    wrong = RowMap(rows.source_R, rows.slots_TK.clone().fill_(index))
    with pytest.raises(ConfigError, match=rf"name rows from 0 to 13, got {index} to {index}; pass"):
        module(x, counts, rows=wrong)


def test_tokens_it_was_not_made_for_are_refused() -> None:
    rows, counts = routing()
    module = GroupedMLP(G, H, FFN)
    with pytest.raises(ShapeError, match="for 7 tokens, got 8"):
        module(torch.randn(8, H), counts, rows=rows)
    with pytest.raises(DeviceError, match="row map is on cpu, the tokens are on meta"):
        rows.check(torch.randn(7, H, device="meta"))


def test_a_map_by_expert_takes_the_choices_of_any_router() -> None:
    expert_TK = torch.tensor([[2, 0], [0, 2], [2, 3]])
    rows, counts_E = RowMap.by_expert(expert_TK, 4)
    assert counts_E.tolist() == [2, 0, 3, 1]
    assert rows.source_R.tolist() == [0, 1, 0, 1, 2, 2]
    weight_TK = torch.randn(3, 2, requires_grad=True)
    weight_R = rows.weights(weight_TK)
    assert torch.equal(weight_R[rows.slots_TK], weight_TK)
    (dweight_TK,) = torch.autograd.grad(weight_R, weight_TK, torch.arange(6.0))
    assert torch.equal(dweight_TK, rows.slots_TK.float())


def test_experts_of_a_foreign_router_are_a_loop_over_them() -> None:
    module, x = GroupedMLP(G, H, FFN), torch.randn(9, H, dtype=torch.float64)
    module = module.double()
    weight_TK, expert_TK = torch.rand(9, G, dtype=torch.float64).topk(2)
    expert_TK[4, 1] = G  # nobody's
    rows, counts_G = RowMap.by_expert(expert_TK, G)
    y = module(x, counts_G, rows.weights(weight_TK), rows=rows, combined=True)
    expected = torch.zeros_like(x)
    for expert in range(G):
        token, k = (expert_TK == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ module.fc1_weight[expert].T).chunk(2, dim=-1)
        out = (torch.nn.functional.silu(gate) * up) @ module.fc2_weight[expert].T
        expected.index_add_(0, token, out * weight_TK[token, k, None])
    torch.testing.assert_close(y, expected)


def test_choices_and_weights_that_do_not_fit_are_refused() -> None:
    expert_TK = torch.tensor([[0, 1]])
    with pytest.raises(ShapeError, match=r"needs \(T, K\), got \(2,\)"):
        RowMap.by_expert(expert_TK[0], 2)
    with pytest.raises(DtypeError, match=r"int32 or int64, got torch\.float32"):
        RowMap.by_expert(expert_TK.float(), 2)
    with pytest.raises(ConfigError, match="num_experts"):
        RowMap.by_expert(expert_TK, 0)
    with pytest.raises(DtypeError, match=r"integer tensor \(T, K\), got list; pass what topk"):
        RowMap.by_expert([[0, 1]], 2)  # pyright: ignore[reportArgumentType]
    rows, _ = RowMap.by_expert(expert_TK, 2)
    with pytest.raises(ShapeError, match=r"each of \(1, 2\) copies, got shape \(2,\)"):
        rows.weights(torch.ones(2))
    with pytest.raises(DeviceError, match="row map is on cpu, the weights are on meta"):
        rows.weights(torch.ones(1, 2, device="meta"))
    with pytest.raises(DtypeError, match=r"floating-point tensor, got torch\.int64; use float32"):
        rows.weights(expert_TK)
