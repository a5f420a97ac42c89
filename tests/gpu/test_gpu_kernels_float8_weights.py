"""Columns of weights on a GPU against the reference on the CPU, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backstash import kernels
from host_reads import no_host_reads
from quantizer_cases import by_dtype, by_special, special_matrix
from twin_cases import assert_twin_bytes

pytestmark = pytest.mark.gpu
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIZES = [(1, 16, 16), (3, 130, 72), (5, 768, 300), (2, 1, 1), (4, 0, 32), (0, 16, 16)]


def check(w: torch.Tensor, code: torch.dtype = E4M3, **options: Any) -> None:
    wanted = kernels.quantize_float8_weight(w, code, **options)
    with no_host_reads():
        found = kernels.quantize_float8_weight(w.cuda(non_blocking=True), code, **options)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype is other.dtype
        both = (
            part if part.dtype is torch.float32 else part.view(torch.uint8) for part in (one, other)
        )
        assert_twin_bytes(*both)


@by_dtype
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_weights_are_the_references(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(torch.randn(size).to(dtype))


@by_special
@pytest.mark.parametrize("code", [E4M3, E5M2], ids=str)
def test_special_values_are_the_references(special: list[float], code: torch.dtype) -> None:
    w = special_matrix(special).unsqueeze(0)
    check(w, code)
    check(w, code, power_of_two=True)
    check(w, code, epsilon=1e-3)


def check_noted(w: torch.Tensor, code: torch.dtype = E4M3, **options: Any) -> None:
    wanted = kernels.quantize_float8_weight_rows(w, code, **options)
    on_gpu = w.cuda()
    with no_host_reads():
        found = kernels.quantize_float8_weight_rows(on_gpu, code, **options)
        amax = kernels.largest_of_parts(found.parts_GPK)
        columns = kernels.quantize_float8_weight(on_gpu, code, amax, **options)
    both = [*found[:2], amax], [*wanted[:2], kernels.largest_of_parts(wanted.parts_GPK)]
    for one, other in zip(*both, strict=True):
        assert one.dtype is other.dtype
        assert_twin_bytes(one.float(), other.float())
    for one, other in zip(columns, kernels.quantize_float8_weight(w, code, **options), strict=True):
        assert_twin_bytes(one.float(), other.float())


@by_dtype
@pytest.mark.parametrize("size", [*SIZES, (2, 130, 2048), (2, 70, 2050)], ids=str)
def test_rows_note_the_columns_that_are_the_references(
    size: tuple[int, int, int], dtype: torch.dtype
) -> None:
    check_noted(torch.randn(size).to(dtype))


@by_special
@pytest.mark.parametrize("code", [E4M3, E5M2], ids=str)
def test_special_values_are_noted_as_the_references(
    special: list[float], code: torch.dtype
) -> None:
    w = special_matrix(special).unsqueeze(0)
    check_noted(w, code)
    check_noted(w.bfloat16(), code, power_of_two=True)
    check_noted(w.bfloat16(), code, epsilon=1e-3)
