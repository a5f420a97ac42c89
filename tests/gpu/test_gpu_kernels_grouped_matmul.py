"""Grouped matmuls, sums and biases on a GPU against the reference on the CPU."""

import importlib

import pytest
import torch
from torch.nn import functional

from backstash import kernels
from grouped_cases import assert_rounded, by_half, by_split, defined, operands
from host_reads import no_host_reads
from quantizer_cases import NAN, by_counts
from twin_cases import random_counts

pytestmark = pytest.mark.gpu


def assert_near(got, wanted):
    """Within two roundings to bfloat16 of the result and of a sum's terms."""
    near = 2 * torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(got.cpu().double(), wanted.double(), rtol=near, atol=near)


def whole_numbers(rows, columns):
    """Numbers whose sums float32 holds exactly, in whatever order they are added."""
    return torch.randint(-100, 101, (rows, columns)).float()


@pytest.mark.parametrize("columns", [8, 65, 256])
@by_counts
def test_matmuls_are_the_references_and_neither_read_nor_leave_the_tail(counts, columns):
    rows, tail, groups = sum(counts), 7, len(counts)
    x, dy = (torch.randn(rows + tail, size) for size in (72, columns))
    x[rows:], dy[rows:] = NAN, NAN
    w = torch.randn(groups, columns, 72)
    x, dy, w = (value.bfloat16() for value in (x, dy, w))
    ends = torch.tensor(counts).cumsum(0).int()
    on_gpu = [value.cuda() for value in (x, dy, w, ends)]
    with no_host_reads():
        y = kernels.grouped_mm(on_gpu[0], on_gpu[2], on_gpu[3])
        dx = kernels.grouped_mm_dx(on_gpu[1], on_gpu[2], on_gpu[3])
        dw = kernels.grouped_mm_dw(on_gpu[1], on_gpu[0], on_gpu[3])
    x, dy, w = (value.double() for value in (x, dy, w))
    assert_near(y, kernels.grouped_mm(x, w, ends))
    assert_near(dx, kernels.grouped_mm_dx(dy, w, ends))
    assert_near(dw, kernels.grouped_mm_dw(dy, x, ends))
    assert not y[rows:].any()
    assert not dx[rows:].any()
    assert not dw[torch.tensor(counts) == 0].any()


def products(x, dy, w, ends):
    """All three, none of which may read the ends on the host."""
    with no_host_reads():
        return [
            kernels.grouped_mm(x, w, ends),
            kernels.grouped_mm_dx(dy, w, ends),
            kernels.grouped_mm_dw(dy, x, ends),
        ]


@by_half
@by_split
def test_odd_sizes_give_the_definition(counts, dtype):
    x, dy, w, ends = operands(counts, 65, 131, dtype)
    wanted = defined(counts, x, dy, w)
    for got, want, terms in zip(
        products(x, dy, w, ends), wanted, (65, 131, max(counts)), strict=True
    ):
        assert got.dtype is dtype
        assert_rounded(got, want, terms)


@by_split
@pytest.mark.parametrize(("k", "n"), [(64, 256), (65, 131)], ids=str)
def test_torchs_matmuls_of_another_gpu_give_the_definition(counts, k, n, monkeypatch):
    multiply, called = functional.grouped_mm, []

    def counted(*operands, **options):
        called.append(operands)
        return multiply(*operands, **options)

    monkeypatch.setattr(functional, "grouped_mm", counted)
    ours = importlib.import_module("backstash.kernels.grouped_matmul")
    monkeypatch.setattr(ours, "_is_for_hopper", lambda x: False)
    x, dy, w, ends = operands(counts, k, n, torch.bfloat16)
    wanted = defined(counts, x, dy, w)
    for got, want, terms in zip(products(x, dy, w, ends), wanted, (k, n, max(counts)), strict=True):
        assert_rounded(got, want, terms)
    assert len(called) == 3


def test_weights_stored_the_other_way_round_and_views_give_the_same():
    x, dy, w, ends = operands([70, 0, 200], 128, 256, torch.bfloat16)
    wide = torch.cat([torch.full_like(x, NAN), x], 1)
    other = w.mT.contiguous().mT
    for got, wanted in zip(
        products(wide[:, 128:], dy, other, ends), products(x, dy, w, ends), strict=True
    ):
        assert_rounded(got, wanted.double(), 256)


@pytest.mark.parametrize(
    "ends", [[40, 90, 400], [-5, 7, 100], [100] * 9, [1, 2, 3] + [100] * 200], ids=len
)
def test_ends_outside_the_buffer_and_more_ends_than_rows_are_followed(ends):
    x, dy, w, _ = operands([0] * len(ends), 64, 72, torch.bfloat16, tail=100)
    x, dy = torch.randn_like(x), torch.randn_like(dy)
    cut = torch.tensor(ends).clamp(0, 100)
    counts = cut.diff(prepend=torch.tensor([0])).tolist()
    on_gpu = torch.tensor(ends, dtype=torch.int32).cuda()
    wanted = defined(counts, x, dy, w)
    for got, want in zip(products(x, dy, w, on_gpu), wanted, strict=True):
        assert_rounded(got, want, 100)


def test_a_captured_graph_follows_the_ends_of_each_replay():
    x, dy, w, ends = operands([600], 128, 264, torch.bfloat16)
    x, dy, w = torch.randn_like(x), torch.randn_like(dy), w.new_empty(4, 264, 128).normal_()
    ends = torch.tensor([10, 200, 200, 600], dtype=torch.int32, device="cuda")
    products(x, dy, w, ends)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = products(x, dy, w, ends)
    for now in ([0, 0, 0, 0], [670, 670, 670, 670], [1, 129, 300, 301], [0, 64, 128, 600]):
        ends.copy_(torch.tensor(now, dtype=torch.int32))
        for value in captured:
            value.fill_(NAN)
        graph.replay()
        for got, wanted in zip(captured, products(x, dy, w, ends), strict=True):
            assert torch.equal(got, wanted)


def test_sums_and_biases_of_a_hundred_random_splits_are_the_references():
    for counts, tail in random_counts(100):
        rows = sum(counts)
        x = whole_numbers(rows + tail, 33)
        x[rows:] = NAN
        bias, ends = torch.randn(len(counts), 33), torch.tensor(counts).cumsum(0).int()
        with no_host_reads():
            on_gpu = [value.cuda(non_blocking=True) for value in (x, bias, ends)]
            sums = kernels.group_sum(on_gpu[0], on_gpu[2])
            biased = kernels.add_group_bias(*on_gpu)
        assert torch.equal(sums.cpu(), kernels.group_sum(x, ends))
        assert torch.equal(biased.cpu(), kernels.add_group_bias(x, bias, ends))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_group_with_everything_is_added_up_in_float32_the_same_each_time(dtype):
    x = torch.randn(100_000, 40, device="cuda", dtype=dtype)
    ends = torch.tensor([0, 100_000, 100_000], dtype=torch.int32, device="cuda")
    assert torch.equal(kernels.group_sum(x, ends), kernels.group_sum(x, ends))
    x = whole_numbers(100_000, 40).to(dtype).cuda()
    assert torch.equal(kernels.group_sum(x, ends)[1], x.double().sum(0).to(dtype))
