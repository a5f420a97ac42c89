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
