"""Grouped matmuls, sums and biases on a GPU against the reference on the CPU."""

import pytest
import torch

from backstash import kernels
from host_reads import no_host_reads
from quantizer_cases import NAN, by_counts
from twin_cases import random_counts

pytestmark = pytest.mark.gpu


def assert_near(got, wanted, scale=1.0):
    """Within bfloat16's rounding of the result and of the sum's size."""
    torch.testing.assert_close(
        got.cpu().double(), wanted.double(), rtol=1.6e-2, atol=1.6e-2 * scale
    )


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


def test_sums_and_biases_of_a_hundred_random_splits_are_the_references():
    for counts, tail in random_counts(100):
        rows = sum(counts)
        x = torch.randn(rows + tail, 33)
        x[rows:] = NAN
        bias, ends = torch.randn(len(counts), 33), torch.tensor(counts).cumsum(0).int()
        with no_host_reads():
            on_gpu = [value.cuda(non_blocking=True) for value in (x, bias, ends)]
            sums = kernels.group_sum(on_gpu[0], on_gpu[2])
            biased = kernels.add_group_bias(*on_gpu)
        wanted = kernels.group_sum(x, ends)
        torch.testing.assert_close(sums.cpu(), wanted, rtol=1.3e-6, atol=1e-4)
        assert torch.equal(biased.cpu(), kernels.add_group_bias(x, bias, ends))


def test_one_group_with_everything_sums_the_same_each_time():
    x = torch.randn(100_000, 40, device="cuda")
    ends = torch.tensor([0, 100_000, 100_000], dtype=torch.int32, device="cuda")
    first = kernels.group_sum(x, ends)
    assert torch.equal(first, kernels.group_sum(x, ends))
    torch.testing.assert_close(first[1], x.double().sum(0).float(), rtol=1e-4, atol=1e-3)
