"""Options are words or values, and wrong ones are refused when they are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backstash.errors import ConfigError
from backstash.weights import ShardOptions
from backstash.weights.layout import Split
from backstash.weights.options import Delivery, Others, Reduce


def test_words_become_the_values_they_name() -> None:
    options = ShardOptions(split="rows", reduce="sum", delivery="at_once", others="leave")
    assert options.split is Split.ROWS
    assert options.reduce is Reduce.SUM
    assert options.delivery is Delivery.AT_ONCE
    assert options.others is Others.LEAVE
    assert options == ShardOptions(
        split=Split.ROWS, reduce=Reduce.SUM, delivery=Delivery.AT_ONCE, others=Others.LEAVE
    )


@pytest.mark.parametrize(
    "field",
    [{"split": "columns"}, {"reduce": 3}, {"delivery": None}, {"others": ""}],
    ids=lambda field: next(iter(field)),
)
def test_another_word_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be one of"):
        ShardOptions(**field)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, "float32"], ids=str)
def test_gradients_are_added_up_in_a_wide_float_only(dtype: Any) -> None:
    with pytest.raises(ConfigError, match="accumulate must be"):
        ShardOptions(accumulate=dtype)


def test_a_mean_divides_by_the_ranks_and_a_sum_by_one() -> None:
    assert ShardOptions().divisor(3) == 3
    assert ShardOptions(reduce="sum").divisor(3) == 1
