"""Grouped products of any dtype, in Triton's interpreter and on a GPU, by their definition."""

from __future__ import annotations

import importlib

import pytest
import torch

from interpreter import by_device, run_interpreted
from test_kernels_grouped_mm import assert_close, by_counts, by_size, define, make

# The interpreter rounds 16-bit results wrongly.
by_wide = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def test_the_interpreted_kernels_pass_these_tests() -> None:
    run_interpreted(__file__)


@pytest.mark.parametrize(
    ("capability", "is_for_torch"),
    [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)],
)
def test_torch_multiplies_only_where_it_leaves_the_sizes_on_the_device(
    capability, is_for_torch, monkeypatch
):
    pytest.importorskip("triton")
    grouped = importlib.import_module("backstash.kernels.grouped_matmul")
    monkeypatch.setattr(grouped, "capability", lambda device: capability)
    assert grouped._is_for_torch(torch.zeros(1, dtype=torch.bfloat16)) is is_for_torch
    assert not grouped._is_for_torch(torch.zeros(1, dtype=torch.float16))


def check(counts, k, n, dtype, device):
    plain = importlib.import_module("backstash.kernels.grouped_plain")
    x, dy, w, ends, groups = make(counts, k, n, dtype=dtype)
    y, dx, dw = define(x, dy, w, groups)
    x, dy, w, ends = x.to(device), dy.to(device), w.to(device), ends.to(device)
    assert_close(plain.multiply_rows(x, w.mT, ends).cpu(), y, dtype)
    assert_close(plain.multiply_rows(dy, w, ends).cpu(), dx, dtype)
    assert_close(plain.multiply_columns(dy, x, ends).cpu(), dw, dtype)


@by_device
@by_counts
@by_size
@by_wide
def test_all_three_products_are_their_definition(counts, k, n, dtype, device):
    check(counts, k, n, dtype, device)


@pytest.mark.gpu
@by_counts
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_are_multiplied_too(counts, dtype):
    check(counts, 70, 63, dtype, "cuda")


@by_device
def test_strided_rows_are_read_where_they_lie(device):
    plain = importlib.import_module("backstash.kernels.grouped_plain")
    x, dy, w, ends = (value.to(device) for value in make([9, 40], 17, 5)[:4])
    wide = torch.randn(x.shape[0], 2, 17, device=device)
    wide[:, 1] = x
    for rows in (wide[:, 1], x.t().contiguous().t()):
        wanted = plain.multiply_rows(x, w.mT, ends)
        assert torch.equal(plain.multiply_rows(rows, w.mT, ends), wanted)
        wanted = plain.multiply_columns(dy, x, ends)
        assert torch.equal(plain.multiply_columns(dy, rows, ends), wanted)
