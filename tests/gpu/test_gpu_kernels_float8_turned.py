"""Rows and turned columns on a GPU against the reference on the CPU, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from backstash import kernels
from backstash.kernels import Turned
from host_reads import no_host_reads
from quantizer_cases import by_counts, by_dtype, by_special, grouped_values, special_matrix
from twin_cases import assert_twin_bytes, random_counts

pytestmark = pytest.mark.gpu
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def assert_turned(found: Turned, wanted: Turned) -> None:
    assert_twin_bytes(found.padded_ends_G, wanted.padded_ends_G)
    assert_twin_bytes(found.scale_inv, wanted.scale_inv)
    end = int(wanted.padded_ends_G[-1])
    codes, right = (one.codes.view(torch.uint8)[:, :end].contiguous() for one in (found, wanted))
    assert_twin_bytes(codes, right)


def check(x: Tensor, ends_G: Tensor, code: torch.dtype = E4M3, **options: Any) -> None:
    """The codes of rows are compared up to the tail."""
    rows = int(ends_G[-1].clamp(max=len(x)))
    (codes, scale_inv), turned = kernels.quantize_float8_rows_and_turned(x, code, ends_G, **options)
    with no_host_reads():
        there = x.cuda(non_blocking=True), code, ends_G.cuda(non_blocking=True)
        found = kernels.quantize_float8_rows_and_turned(*there, **options)
        columns = kernels.quantize_float8_turned(*there, **options)
    assert_twin_bytes(found[0][0][:rows], codes[:rows])
    assert_twin_bytes(found[0][1][:rows], scale_inv[:rows])
    assert_turned(found[1], turned)
    assert_turned(columns, turned)


@by_dtype
@by_counts
def test_groups_are_the_references(counts: list[int], dtype: torch.dtype) -> None:
    x, ends_G = grouped_values(counts, 72)
    check(x.to(dtype), ends_G)


def test_a_matrix_without_rows_is_the_references() -> None:
    check(torch.empty(0, 48, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int32))


@pytest.mark.parametrize("columns", [1, 16, 130, 300])
def test_random_splits_are_the_references(columns: int) -> None:
    for counts, tail in random_counts(10):
        x = torch.randn(sum(counts) + tail, columns, dtype=torch.bfloat16)
        x[sum(counts) :] = float("nan")
        check(x, torch.tensor(counts).cumsum(0))


@pytest.mark.parametrize("columns", [16, 130])
def test_rows_of_a_map_are_the_references(columns: int) -> None:
    for counts, tail in random_counts(6):
        rows = sum(counts) + tail
        x, ends_G = torch.randn(33, columns).bfloat16(), torch.tensor(counts).cumsum(0)
        source_T = torch.randint(0, 33, (rows,))
        wanted = kernels.quantize_float8_turned(x, E4M3, ends_G, source_T)
        with no_host_reads():
            there = [one.cuda(non_blocking=True) for one in (x, ends_G, source_T)]
            found = kernels.quantize_float8_turned(there[0], E4M3, *there[1:])
        assert_turned(found, wanted)


@by_special
@pytest.mark.parametrize("code", [E4M3, E5M2], ids=str)
def test_special_values_are_the_references(special: list[float], code: torch.dtype) -> None:
    x = special_matrix(special)
    ends_G = torch.tensor([0, len(x) // 3, len(x) + 5])
    check(x, ends_G, code)
    check(x, ends_G, code, power_of_two=True)
    check(x, ends_G, code, epsilon=1e-3)
