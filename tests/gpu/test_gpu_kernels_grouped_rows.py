"""Rows times the weight of their group on a Hopper GPU, tile by tile."""

import importlib

import pytest
import torch

from grouped_cases import assert_rounded, by_half, by_split, defined, operands
from host_reads import no_host_reads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
        reason="kernels for Hopper",
    ),
]
NAN = float("nan")


def multiply_rows(a, b, ends):
    kernel = importlib.import_module("backstash.kernels.grouped_rows").multiply_rows
    is_turned = b.stride(1) == 1
    with no_host_reads():
        return kernel(a, b.mT if is_turned else b, ends, is_turned=is_turned)


@by_half
@by_split
@pytest.mark.parametrize(("k", "n"), [(64, 256), (72, 520), (136, 8)], ids=str)
def test_both_layouts_of_the_weights_give_the_definition(counts, k, n, dtype):
    x, dy, w, ends = operands(counts, k, n, dtype)
    y, dx, _ = defined(counts, x, dy, w)
    assert_rounded(multiply_rows(x, w.mT, ends), y, k)
    assert_rounded(multiply_rows(dy, w, ends), dx, n)


def test_neither_rows_nor_weights_of_a_neighbour_are_heard():
    counts = [30, 100, 50]
    x, _, w, ends = operands(counts, 72, 264, torch.bfloat16)
    wanted = multiply_rows(x, w.mT, ends)
    for g, rows in ((0, slice(0, 30)), (2, slice(130, 180))):
        x[rows], w[g] = NAN, NAN
    got = multiply_rows(x, w.mT, ends)
    assert torch.equal(got[30:130], wanted[30:130])
    assert got[:30].isnan().all()
    assert not got[180:].any()


def test_views_of_a_wider_buffer_are_read_where_they_lie():
    x, _, w, ends = operands([40, 90], 64, 256, torch.bfloat16)
    wide = torch.full((x.shape[0], 200), NAN, device="cuda", dtype=x.dtype)
    wide[:, 64:128] = x
    assert torch.equal(multiply_rows(wide[:, 64:128], w.mT, ends), multiply_rows(x, w.mT, ends))


def test_more_tiles_than_processors_are_all_computed_the_same_each_time():
    counts = [5000, 1, 0, 3000, 129, 2000]
    x, dy, w, ends = operands(counts, 256, 1032, torch.bfloat16, tail=3000)
    y, *_ = defined(counts, x, dy, w)
    first = multiply_rows(x, w.mT, ends)
    assert_rounded(first, y, 256)
    assert not first[sum(counts) :].any()
    for _ in range(5):
        assert torch.equal(multiply_rows(x, w.mT, ends), first)
