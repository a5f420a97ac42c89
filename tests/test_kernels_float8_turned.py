"""Columns that are turned as they are quantized are the columns that others quantize, turned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backstash import kernels

SPLITS = {"awkward": ([5, 0, 31, 1], 40), "empty": ([0, 0], 3), "whole": ([16, 32], 48)}
OPTIONS = {"plain": {}, "power-of-two": {"power_of_two": True}, "epsilon": {"epsilon": 1.0}}


def test_rows_of_a_map_are_those_of_the_gathered_matrix() -> None:
    x, source_T = torch.randn(9, 24), torch.tensor([3, 3, 0, 8, 1, 3, 7, 2, 5, 4, 6])
    ends_G = torch.tensor([2, 2, 10], dtype=torch.int32)
    code = torch.float8_e4m3fn
    found = kernels.quantize_float8_turned(x, code, ends_G, source_T)
    wanted = kernels.quantize_float8_turned(x[source_T], code, ends_G)
    assert all(
        torch.equal(*(one.float() for one in pair)) for pair in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize(("counts", "rows"), SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("code", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_rows_and_turned_columns_are_those_of_two_quantizations(
    counts: list[int], rows: int, options: dict[str, Any], code: torch.dtype
) -> None:
    x, ends_G = torch.randn(rows, 24), torch.tensor(counts).cumsum(0).int()
    (codes, scale_inv), turned = kernels.quantize_float8_rows_and_turned(x, code, ends_G, **options)
    wanted, wanted_scale_inv = kernels.quantize_float8_rows(x, code, **options)
    assert torch.equal(codes, wanted)
    assert torch.equal(scale_inv, wanted_scale_inv)
    columns, columns_scale_inv = kernels.quantize_float8_columns(x, code, ends_G, **options)
    wanted, padded_G = kernels.transpose_groups(columns, ends_G)
    for found in (turned, kernels.quantize_float8_turned(x, code, ends_G, **options)):
        assert found.codes.dtype is code
        assert torch.equal(found.padded_ends_G, padded_G)
        assert torch.equal(found.scale_inv, columns_scale_inv)
        end = int(padded_G[-1])
        assert torch.equal(found.codes.view(torch.uint8)[:, :end], wanted[:, :end])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("code", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_weight_is_groups_of_as_many_rows(code: torch.dtype, options: dict[str, Any]) -> None:
    w = torch.randn(3, 32, 24)
    w[1, 4, 5] = float("nan")
    codes, scale_inv = kernels.quantize_float8_weight(w, code, **options)
    ends_G = torch.tensor([32, 64, 96])
    turned, wanted, _ = kernels.quantize_float8_turned(w.flatten(0, 1), code, ends_G, **options)
    right = turned[:, :96].unflatten(1, (3, 32)).transpose(0, 1)
    assert codes.is_contiguous()
    assert torch.equal(codes.view(torch.uint8), right.contiguous().view(torch.uint8))
    assert torch.equal(scale_inv, wanted)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_what_rows_note_of_a_weight_makes_the_same_columns(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    w, code = torch.randn(3, 32, 24).to(dtype), torch.float8_e4m3fn
    w[1, 4, 5] = w[2, :, 3] = w[0, 2] = float("nan")
    codes, scale_inv, parts = kernels.quantize_float8_weight_rows(w, code, **options)
    amax = kernels.largest_of_parts(parts)
    assert amax.dtype is (dtype if dtype is torch.bfloat16 else torch.float32)
    assert torch.equal(amax.float(), w.float().abs().nan_to_num(0).amax(1))
    wanted = kernels.quantize_float8_rows(w.flatten(0, 1), code, **options)
    assert torch.equal(codes, wanted[0])
    assert torch.equal(scale_inv, wanted[1])
    found = kernels.quantize_float8_weight(w, code, amax, **options)
    for one, other in zip(found, kernels.quantize_float8_weight(w, code, **options), strict=True):
        assert torch.equal(one.float().nan_to_num(9), other.float().nan_to_num(9))
