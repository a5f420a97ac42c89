"""Sizes of launches are those of Triton's own functions."""

from __future__ import annotations

import pytest

from backstash.kernels.sizes import ceil_div, next_power_of_2


@pytest.mark.parametrize("count", [0, 1, 2, 3, 63, 64, 65, 2**20 - 1, 2**31 + 1])
@pytest.mark.parametrize("block", [1, 7, 64])
def test_blocks_cover_what_is_there_and_none_is_empty(count, block):
    blocks = ceil_div(count, block)
    assert (blocks - 1) * block < count <= blocks * block or count == blocks == 0


@pytest.mark.parametrize("count", [1, 2, 3, 63, 64, 65, 2**20 - 1, 2**31 + 1])
def test_a_power_of_two_holds_the_count_and_its_half_does_not(count):
    power = next_power_of_2(count)
    assert power & (power - 1) == 0
    assert power // 2 < count <= power


def test_a_power_that_holds_nothing_is_one():
    assert next_power_of_2(0) == 1


@pytest.mark.parametrize("count", [1, 5, 64, 1000])
def test_both_are_what_triton_gives(count):
    triton = pytest.importorskip("triton")
    assert ceil_div(count, 16) == triton.cdiv(count, 16)
    assert next_power_of_2(count) == triton.next_power_of_2(count)
